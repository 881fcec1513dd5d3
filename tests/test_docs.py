"""What the documents promise: their code runs, their links lead somewhere, and the files speak of nowhere else."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.effort import in_ci
from support.forks import in_fork

ROOT = Path(__file__).resolve().parents[1]
README, QUICKSTART, COLLECTOR = ROOT / "README.md", ROOT / "docs" / "quickstart.md", ROOT / "docs" / "collector.md"
DOCUMENTS = [
    *(README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"),
    *(ROOT / folder / "README.md" for folder in ("benchmarks", "examples")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

SHORTER = {
    README: [(r"^for _ in range\(40\):$", "for _ in range(2):"), (r"^for _ in range\(400\):$", "for _ in range(12):")],
    COLLECTOR: [
        (r"Pendulum-v1\"", r"\g<0>, max_episode_steps=100"),  # half of what it is, and what depends on it follows
        (r"num_steps=250\b", "num_steps=120"),
        (r"num_steps == 1000\b", "num_steps == 480"),
        (r"collect\(100\)", "collect(50)"),
        (r"collect\(150\)", "collect(70)"),
        (r"collect\(401\)", "collect(201)"),
        (r"\[1:200\]", "[1:100]"),
        (r"\[:199\]", "[:99]"),
        (r"\[200\] \*", "[100] *"),
    ],
    QUICKSTART: [
        (r"^for update in range\(1, 41\):$", "for update in range(19, 21):"),
        (r"^assert sum\(collector\.returns\).* > 100$", ""),
    ],
}
"""What a quick run changes in pages that train: the loops are short, and the agent need not have learned."""

LANGUAGES = {"python", "console", "bash", "make", "toml", "json", "text", ""}
"""How a block may be labelled: only `python` runs, so any other spelling of it would go unnoticed."""

PAGE_SECONDS = 300.0
"""How long the code of a page may take before it counts as hanging; the README trains the longest."""

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[^`\n]*)$")
NO_RUN = re.compile(r"<!-- *no-run(?P<reason>.*?)-->")
NEEDS = re.compile(r"<!-- *needs: *(?P<module>\w+) *-->")


@dataclass(frozen=True)
class Block:
    """A fenced block: its label, the line its code starts on (from 1), its code, and what stands right before."""

    language: str
    line: int
    code: str
    before: str

    @property
    def no_run(self) -> str | None:
        """The reason not to run it; None where it runs."""
        needs = NEEDS.fullmatch(self.before)
        if needs:
            return None if find_spec(needs["module"]) else f"{needs['module']} is not installed"
        found = NO_RUN.fullmatch(self.before)
        return found["reason"].lstrip(": ").rstrip() if found else None


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a document, in order."""
    found: list[Block] = []
    opened: tuple[re.Match[str], int] | None = None
    lines = text.splitlines()
    for number, line in enumerate(lines):
        fence = FENCE.match(line)
        if fence and opened is None:
            opened = fence, number
        elif fence and opened and not fence["language"].strip():
            start, first = opened
            code = [line[len(start["indent"]) :] for line in lines[first + 1 : number]]
            before = next((line.strip() for line in reversed(lines[:first]) if line.strip()), "")
            found.append(Block(start["language"].strip(), first + 2, "\n".join(code) + "\n", before))
            opened = None
    assert opened is None, f"line {opened[1] + 1 if opened else 0}: a block is never closed"
    return found


def program(text: str, name: str) -> str:
    """All the code of a document that runs, each line where it stands there, so that a traceback points at it."""
    lines = [""] * len(text.splitlines())
    for block in blocks(text):
        if block.language != "python":
            continue
        compile(block.code, f"{name}:{block.line}", "exec")
        if block.no_run is None:
            code = block.code.splitlines()
            lines[block.line - 1 : block.line - 1 + len(code)] = code
    return "\n".join(lines) + "\n"


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def run_page(script: Path) -> None:
    """Run a page's code as a script would run, in this process."""
    os.chdir(script.parent)
    sys.argv = [script.name]
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        runpy.run_path(str(script), run_name="__main__")


FOLDERS = {"migration", "recipes", "reference"}
"""Of `docs`: many pages of one form. `make test` leaves most of their code to `.ci/run`."""

FORMS = {"skrl.md", "cleanrl-ppo.md", "replays.md"}


@pytest.mark.parametrize(
    "document",
    [in_ci(x) if x.parent.name in FOLDERS and x.name not in FORMS else x for x in DOCUMENTS],
    ids=short,
)
def test_every_python_block_runs(document: Path, tmp_path: Path):
    code = program(document.read_text(encoding="utf-8"), short(document))
    for long, shorter in SHORTER.get(document, []):
        code, count = re.subn(long, shorter, code, flags=re.MULTILINE)
        assert count, f"no line is {long}"
    assert_runs(code, document, tmp_path)


@pytest.mark.parametrize("document", [pytest.param(README, marks=pytest.mark.slow), in_ci(QUICKSTART)], ids=short)
def test_a_page_trains_as_long_as_it_says(document: Path, tmp_path: Path):
    assert_runs(program(document.read_text(encoding="utf-8"), short(document)), document, tmp_path)


def assert_runs(code: str, document: Path, tmp_path: Path) -> None:
    """Run a page's code in a process of its own; an error's line numbers are those of the page."""
    if not code.strip():
        return
    script = tmp_path / f"{document.stem}.md.py"
    script.write_text(code, encoding="utf-8")
    # A forked process has all packages loaded; a new one would take longer to start than to run.
    in_fork(run_page, script, seconds=PAGE_SECONDS, name=short(document))


def complaints(check: Callable[[str, Path], Iterable[str]]) -> list[str]:
    """What a check of a document's text complains of, in all of them."""
    return [f"{short(x)}: {found}" for x in DOCUMENTS for found in check(text_of(x), x)]


@cache
def text_of(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def test_no_line_but_of_a_table_or_of_what_a_script_wrote_is_longer_than_120_characters():
    def check(text: str, _: Path) -> list[str]:
        text = re.sub(r"<!-- bench:.*?<!-- /bench:", "", text, flags=re.DOTALL)
        return [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")]

    assert complaints(check) == []


def test_the_readme_says_how_to_see_it_learn_and_how_to_run_its_tests():
    assert {"demo", "test"} <= {*re.findall(r"^\$ make (\w+)", README.read_text(encoding="utf-8"), re.MULTILINE)}


def test_the_readme_has_at_most_150_lines():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_every_block_has_a_known_label_and_every_no_run_a_reason():
    def check(text: str, _: Path) -> Iterable[str]:
        for block in blocks(text):
            if block.language not in LANGUAGES:
                yield f"line {block.line}: label {block.language!r} is not one of {sorted(LANGUAGES)}"
            if block.no_run == "":
                yield f"line {block.line}: say why it does not run: <!-- no-run: reason -->"
            if block.no_run is not None and block.language != "python":
                yield f"line {block.line}: only python runs anyway"

    assert complaints(check) == []


def make_targets_named(text: str) -> set[str]:
    """The targets of each `make x` in a code span, and in each console or bash block."""
    code = [block.code for block in blocks(text) if block.language in {"console", "bash"}]
    commands = [line for part in code for line in re.split(r"\n|&&|;", part)] + re.findall(r"`([^`\n]+)`", text)
    named: set[str] = set()
    for command in commands:
        found = re.match(r"[$\s]*make((?: +[A-Za-z][\w.=/-]*)+)", command)
        if found:
            named |= {word for word in found[1].split() if "=" not in word}
    return named


def test_every_make_target_exists():
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert complaints(lambda text, _: make_targets_named(text) - targets) == []


def test_make_help_has_a_short_line_for_each_target_and_begins_with_those_of_a_newcomer():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    phony = re.findall(r"^\.PHONY: (.*)", makefile, re.MULTILINE)[0].split()
    _, first, *others = re.split(r"^##@ .+$", makefile, flags=re.MULTILINE)
    first, rest = (dict(re.findall(r"^([a-z-]+):.*?## (.+)$", text, re.MULTILINE)) for text in (first, "".join(others)))
    assert {"setup", "demo", "test", "docs", "bench-quick"} <= first.keys()
    assert len(first) <= 8
    assert {*first, *rest} == {*phony} - {"outdated"}
    assert max(map(len, [*first.values(), *rest.values()])) <= 90


def test_contributing_the_changelog_and_the_decisions_can_be_read_in_one_sitting():
    assert len(text_of(ROOT / "CONTRIBUTING.md").encode()) <= 8_000
    releases = re.split(r"^## \[", text_of(ROOT / "CHANGELOG.md"), flags=re.MULTILINE)[1:]
    assert releases
    assert max(len(text.encode()) for text in releases) <= 5_000
    assert len(text_of(ROOT / "docs" / "decisions.md").splitlines()) <= 350


def test_a_docstring_names_its_subject():
    begins = re.compile(r'^ *"""(?:What|The same|That of)\b.*', re.MULTILINE)
    sources = sorted((ROOT / "src" / "relive").rglob("*.py"))
    assert [f"{short(x)}: {line.strip()}" for x in sources for line in begins.findall(text_of(x))] == []


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as code hosts make them."""
    slugs: list[str] = []
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *#*$", without_blocks(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{slug}-{slugs.count(slug)}" if slug in slugs else slug)
        slugs.append(slug)
    return found


def without_blocks(text: str) -> str:
    return re.sub(r"^( *)```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


def links(text: str) -> list[str]:
    """Where the inline links, pictures and link definitions of a document lead; those to the web are left out."""
    prose = re.sub(r"`[^`\n]*`", "", without_blocks(text))
    found = re.findall(r"\]\(<?([^)\s>]+)>?(?: +\"[^\"]*\")?\)", prose)
    found += re.findall(r"^\[[^\]]+\]: *<?(\S+?)>?$", prose, re.MULTILINE)
    found += re.findall(r"<(?:img|a)\b[^>]*?(?:src|href)=\"([^\"]+)\"", prose)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@cache
def anchors_of(document: Path) -> set[str]:
    return anchors(text_of(document))


def broken(link: str, document: Path) -> str | None:
    """Why a link leads nowhere; None where it does lead somewhere."""
    path, _, anchor = link.partition("#")
    target = (document.parent / path).resolve() if path else document
    if not target.is_relative_to(ROOT) or not target.exists():
        return f"{link}: there is no such file"
    if anchor and target.suffix == ".md" and anchor not in anchors_of(target):
        return f"{link}: there is no such heading"
    return None


def test_every_link_leads_somewhere():
    assert complaints(lambda text, document: filter(None, (broken(link, document) for link in links(text)))) == []


RECIPES = sorted(page for page in (ROOT / "docs" / "recipes").glob("*.md") if page.name != "index.md")


def test_every_recipe_is_in_their_index():
    index = (ROOT / "docs" / "recipes" / "index.md").read_text(encoding="utf-8")
    assert {page.name for page in RECIPES} <= set(links(index))


@pytest.mark.parametrize("page", RECIPES, ids=short)
def test_a_recipe_has_code_that_asserts_and_says_what_goes_wrong_and_where_to_read_on(page: Path):
    text = page.read_text(encoding="utf-8")
    assert "assert " in program(text, short(page))
    assert "\n## What goes wrong here\n" in text
    assert "\nRead on: [" in text


# Written in pieces, so that this file does not itself contain what it looks for.
HOSTS = [r"pypi\.o" + "rg", "python" + "hosted", "download.py" + "torch", "registry.npm" + "js", "anaconda" + r"\.org"]
FOLDERS = "|".join(("home", "root", "tmp", "work", "farm", "Users"))
ELSEWHERE = [
    (re.compile("|".join(HOSTS)), "names a package registry; let pip find it"),
    (re.compile(rf"(?<![\w.~$}}/-])/(?:{FOLDERS})/"), "names a folder of one machine"),
]


def text_files() -> dict[str, str]:
    """Every text file that is in the repository, or would be if everything were added."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so there is no telling its files from others")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts: dict[str, str] = {}
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            data = (ROOT / name).read_bytes()
            if b"\0" not in data:
                texts[name] = data.decode("utf-8")
    return texts


def mentions(texts: dict[str, str]) -> list[str]:
    return [
        f"{name}:{number}: {complaint}: {line.strip()[:80]}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), start=1)
        for pattern, complaint in ELSEWHERE
        if pattern.search(line)
    ]


def test_no_file_names_a_registry_or_a_folder_of_one_machine():
    assert mentions(text_files()) == []


SAMPLE = """# Title of `it`

Run `make test` and then [see below](#title-of-it), or [that](missing.md).

```python
x = 1
```

- in a list:

  ```python
  print(x)
  ```

<!-- no-run: needs a cluster -->

```python
raise SystemExit(3)
```

```console
$ cd there && make bench
```
"""


def test_the_reader_finds_blocks_links_targets_and_reasons():
    first, second, third, last = blocks(SAMPLE)
    assert (first.language, first.line, first.code, first.no_run) == ("python", 6, "x = 1\n", None)
    assert (second.line, second.code) == (12, "print(x)\n")
    assert (third.no_run, last.language) == ("needs a cluster", "console")
    assert program(SAMPLE, "sample").rstrip().splitlines() == [*[""] * 5, "x = 1", *[""] * 5, "print(x)"]
    assert make_targets_named(SAMPLE) == {"test", "bench"}
    assert anchors(SAMPLE) == {"title-of-it"}
    assert anchors("# A\n\n## [B & b](x.md)\n\n# A\n") == {"a", "b--b", "a-1"}
    assert links(SAMPLE) == ["#title-of-it", "missing.md"]
    assert broken("missing.md", ROOT / "README.md")
    assert broken("pyproject.toml", ROOT / "README.md") is None


@pytest.mark.parametrize(("module", "runs"), [("torch", True), ("no_such_module", False)])
def test_a_block_that_needs_a_module_runs_where_it_is_installed(module: str, runs: bool):
    sample = f"<!-- needs: {module} -->\n\n```python\nx = 1\n```\n"
    assert ("x = 1" in program(sample, "sample")) is runs


def test_a_no_run_without_a_reason_and_code_that_does_not_parse_are_caught():
    assert blocks("<!-- no-run -->\n```python\nx\n```\n")[0].no_run == ""
    with pytest.raises(SyntaxError):
        program("<!-- no-run: why -->\n```python\nx =\n```\n", "sample")


@pytest.mark.parametrize(
    "line", ["see /" + "tmp/x.png", "`/" + "home/me`", "pip install -i https://py" + "pi.org/simple x"]
)
def test_a_line_that_speaks_of_elsewhere_is_caught(line: str):
    assert mentions({"a.md": line})


@pytest.mark.parametrize("line", ["src/tmp/x", "the /work, the /home", "${TMPDIR}/tmp/x", "a/work/b"])
def test_a_line_that_does_not_is_let_pass(line: str):
    assert mentions({"a.md": line}) == []
