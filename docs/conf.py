"""How Sphinx makes the site of the pages: `make docs`.

The pages are plain Markdown and read well without the site, so all that only Sphinx knows is written in comments:

- ``<!-- reference: relive.GAE -->`` stands for the docstrings of that object and its public members. ``<!-- reference:
  relive.NStep, alone -->`` leaves the members out, ``, members: a b`` names the ones to show, and ``, again`` is for an
  object that another page has under another name.
- ``<!-- tabs -->`` and ``<!-- /tabs -->`` enclose headings of one level, each of which becomes a tab.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.parsers import Parser
from sphinx.search.en import SearchEnglish

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

# The site -----------------------------------------------------------------------------------------------------------

project = "relive"
author = "the relive authors"
project_copyright = author
relive = import_module("relive")
version = release = relive.__version__

REPOSITORY = ""
"""``OWNER/NAME`` on GitHub. Once it is known, each notebook leads to Colab."""

NAVIGATION = {
    "Start": [
        "docs/quickstart",
        "docs/concepts",
        "docs/episode-ends",
        "docs/side-by-side",
        "docs/compare",
        "examples/README",
    ],
    "Steps": ["docs/schema", "docs/collector"],
    "Rollouts": ["docs/rollouts", "docs/returns", "docs/sequences"],
    "Replays": ["docs/replay", "docs/samplers", "docs/views", "docs/hindsight", "docs/device", "docs/stores"],
    "Files": ["docs/files", "docs/durable", "docs/exchange", "docs/security"],
    "Processes and machines": ["docs/processes", "docs/serving", "docs/scaling", "docs/cluster"],
    "Look and check": ["docs/errors", "docs/audit", "docs/inspect", "docs/traps", "docs/audit-of-libraries"],
    "Recipes and more": ["docs/*", "docs/recipes/*", "docs/notebooks/*"],
    "Reference": ["docs/reference/*"],
    "Coming from another library": ["docs/migration/*"],
    "Project": ["benchmarks/README", "docs/stability", "CHANGELOG", "SECURITY"],
    "Contributing": [
        "CONTRIBUTING",
        "docs/contributing/samplers-and-views",
        "docs/contributing/rooms",
        "docs/contributing/core",
        "docs/contributing/*",
        "docs/decisions",
    ],
}
"""The bar on the left: caption -> pages. A pattern takes the pages that no other entry names. Of a folder with a page
``index`` only that one is listed, with the other pages below it."""

root_doc = "docs/index"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_design",
    "sphinx_copybutton",
]
include_patterns = ["docs/*.md", "docs/**/*.md", "docs/notebooks/*.ipynb", "examples/README.md", "examples/*.py"]
include_patterns += ["benchmarks/README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
exclude_patterns = [".*", "build", "dist", "runs", "src", "tests", "**/__pycache__"]
source_suffix = {".md": "markdown", ".ipynb": "markdown", ".py": "program"}

# Pages: headings have the anchors that code hosts give them.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page that a script writes may skip a level of headings

# Docstrings: Google style; types are in the signatures.
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_preprocess_types = False

# The look
html_theme = "furo"
html_title = f"relive {version}"
html_short_title = "relive"
html_static_path = ["theme/static"]
html_css_files = ["site.css"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
        "versions.html",
    ]
}
templates_path = ["theme/templates"]
html_copy_source = False
html_search_scorer = str(ROOT / "docs" / "theme" / "scorer.js")
SearchEnglish.stopwords |= {*ascii_lowercase}  # of "n-step", only "step" is looked for
html_show_sphinx = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .gp, .go"
linkcheck_timeout = 20
linkcheck_anchors = False

# The pages that are found --------------------------------------------------------------------------------------------


def found(pattern: str) -> list[str]:
    """The pages that a pattern names, by path without the ending."""
    paths = (path for ending in (".md", ".py", ".ipynb") for path in ROOT.glob(pattern + ending))
    names = sorted(path.relative_to(ROOT).with_suffix("").as_posix() for path in paths)
    return [name for name in names if name not in ("docs/conf", root_doc)]


def listed(patterns: list[str]) -> list[str]:
    """The pages of an entry of the navigation, each once, without those that stand below an index."""
    named = {name for entries in NAVIGATION.values() for name in entries}
    names: list[str] = []
    for pattern in patterns:
        pages = found(pattern)
        if "*" in pattern:
            pages = [page for page in pages if page not in named]
            pages = [page for page in pages if page.endswith("/index")] or pages
        names += pages
    return names


def below(page: str) -> list[str]:
    """The other pages of the folder of a page that is its index, and the indices of the folders in it."""
    folder = page.rpartition("/")[0]
    if page == root_doc or not page.endswith(("/index", "examples/README")):
        return []
    return [name for name in [*found(f"{folder}/*"), *found(f"{folder}/*/index")] if name != page]


def toctree(pages: list[str], caption: str = "") -> str:
    """A hidden toctree of these pages."""
    options = [":hidden:", f":caption: {caption}" if caption else ":titlesonly:"]
    return "\n".join(["", "", "```{toctree}", *options, "", *(f"/{page}" for page in pages), "```", ""])


# What stands in comments ---------------------------------------------------------------------------------------------

REFERENCE = re.compile(r"^<!-- reference: ([\w.]+)(?:, (alone|again)|, members: ([\w\s]+))? -->$", re.MULTILINE)
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
NAMES = [match[1] for page in PAGES for match in REFERENCE.finditer(page.read_text(encoding="utf-8"))]
OWN = {name.rpartition(".")[2]: name for name in reversed(NAMES)}
"""Short name -> the name under which the reference has it."""

TABS = re.compile(r"^<!-- tabs -->$(.*?)^<!-- /tabs -->$", re.MULTILINE | re.DOTALL)
SOURCE = re.compile(r"\]\((?!\w+:)([^)\s]+\.(?:py|hpp|cpp|pyi))\)")


def documented(match: re.Match[str]) -> str:
    """The directive of autodoc for a comment."""
    name, how, members = match.groups()
    module, _, attribute = name.rpartition(".")
    value = getattr(import_module(module), attribute)
    kind = "class" if isinstance(value, type) else "function" if callable(value) else "data"
    if isinstance(value, type) and issubclass(value, BaseException):
        kind = "exception"
    lines = [f".. auto{kind}:: {name}"]
    if how == "again":
        lines.append("   :no-index:")
    elif kind == "class" and not how:
        lines.append(f"   :members: {', '.join((members or '').split())}".rstrip())
        lines += [] if members else ["   :inherited-members:"]
    return "\n".join(["```{eval-rst}", *lines, "```"])


def tabs(match: re.Match[str]) -> str:
    """Tabs of the headings between two comments."""
    level = re.findall(r"^#+", match[1], re.MULTILINE)[0]  # comments of the code below have another one
    parts = re.split(rf"^{level} (.+)$", match[1], flags=re.MULTILINE)
    items = [
        f"::::{{tab-item}} {title}\n{text.strip()}\n::::" for title, text in zip(parts[1::2], parts[2::2], strict=True)
    ]
    return "\n".join([":::::{tab-set}", *items, ":::::"])


def notebook(text: str) -> str:
    """A notebook as Markdown: its cells, with the text and the pictures that they left."""
    parts: list[str] = []
    for cell in json.loads(text)["cells"]:
        code = "".join(cell["source"])
        parts.append(code if cell["cell_type"] == "markdown" else f"```python\n{code}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            written = "".join(output.get("text", data.get("text/plain", "")))
            if "image/png" in data:
                parts.append(f"![what the cell draws](data:image/png;base64,{''.join(data['image/png']).strip()})")
            elif written:
                parts.append(f"```text\n{written.rstrip()}\n```")
    return "\n\n".join(parts)


def colab(page: str, repository: str, release: str) -> str:
    """A line that opens a notebook of this release in Colab; none while the repository has no address."""
    if not repository:
        return ""
    address = f"https://colab.research.google.com/github/{repository}/blob/v{release}/{page}.ipynb"
    install = f"%pip install git+https://github.com/{repository}@v{release}"
    return f"[Open in Colab]({address}), and run `{install}` in a cell before the others.\n\n"


def source_link(page: str) -> Any:
    """Files that have no page of their own are there to download."""

    def linked(match: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(page), match[1]))
        return match[0] if re.fullmatch(r"examples/\w+\.py", target) else f"](path:{match[1]})"

    return linked


def read(app: Sphinx, page: str, source: list[str]) -> None:
    """Turn the comments of a page into what Sphinx knows."""
    suffix = app.env.doc2path(page).suffix
    if suffix == ".py":
        return
    text = source[0]
    if suffix == ".ipynb":  # below its title
        text = notebook(text).replace("\n", f"\n\n{colab(page, REPOSITORY, release)}", 1)
    text = TABS.sub(tabs, REFERENCE.sub(documented, text))
    text = SOURCE.sub(source_link(page), text)
    if page == root_doc:
        text += "".join(toctree(listed(pages), caption) for caption, pages in NAVIGATION.items() if listed(pages))
    elif below(page):
        text += toctree(below(page))
    source[0] = text


def find_own(app: Sphinx, doctree: nodes.document) -> None:
    """Lead a short name such as ``RolloutBuffer`` or ``gae`` to relive's own. Drop-ins have namesakes of some."""
    for link in doctree.findall(addnodes.pending_xref):
        module = link.get("py:module") or ""
        if link.get("refdomain") == "py" and not module.startswith("relive.compat"):
            link["reftarget"] = OWN.get(link["reftarget"], link["reftarget"])


class Program(Parser):
    """A page of a program: the first sentence of its docstring, and its code."""

    supported = ("program",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Fill the document."""
        name = Path(document["source"]).name
        words = (ast.get_docstring(ast.parse(inputstring)) or "").split("\n\n")[0].replace("``", "")
        code = nodes.literal_block(inputstring, inputstring, language="python")
        section = nodes.section("", nodes.title("", name), nodes.paragraph("", words), code, ids=[name], names=[name])
        document += section


# Versions side by side -----------------------------------------------------------------------------------------------

FORWARD = '<!doctype html><meta charset="utf-8"><title>relive</title><meta http-equiv="refresh" content="0; url={0}">'


def newest_first(folder: Path) -> list[str]:
    """The versions that stand in a folder."""
    names = [path.parent.name for path in folder.glob("*/objects.inv")]
    return sorted(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)


def finish(app: Sphinx, error: Exception | None) -> None:
    """List the versions that stand beside this one, and lead the folders above to the first page."""
    if error or app.builder.name != "html":
        return
    site, pages = Path(app.outdir).parent, f"{root_doc}.html"
    versions = newest_first(site)
    (Path(app.outdir) / "index.html").write_text(FORWARD.format(pages) + "\n", encoding="utf-8")
    (site / "index.html").write_text(FORWARD.format(f"{versions[0]}/{pages}") + "\n", encoding="utf-8")
    (site / "versions.js").write_text(f"window.reliveVersions = {json.dumps(versions)};\n", encoding="utf-8")


def lists_of_pages(app: Sphinx, env: Any, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """The pages that list others are read again, since a new page may belong there."""
    return [page for page in env.found_docs if page == root_doc or below(page)]


def setup(app: Sphinx) -> None:
    """Connect the above."""
    app.add_source_parser(Program)
    app.connect("env-get-outdated", lists_of_pages)
    app.connect("source-read", read)
    app.connect("doctree-read", find_own)
    app.connect("build-finished", finish)
