"""Writes the tables, the headline figures and the charts into the pages that show them.

A page has a place for a table between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`; NAME is a report's,
`headline`, `busy`, `history` or one of `beside.py`. A report's name with `-details` after it is a place for multiples
of the floor and for counts of calls.

python benchmarks/pages.py    rewrites all of them from results/*.json and history.jsonl
"""

import re
from collections.abc import Collection
from pathlib import Path

import beside
import busy
import headline
import history
import tables

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def fill(text: str, name: str, table: str) -> str:
    """The text with the table between the markers of that name; unchanged if it has none."""
    pattern = re.compile(rf"(<!-- bench:{re.escape(name)} -->).*?(<!-- /bench:{re.escape(name)} -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}\n\n{table}\n\n{match[2]}", text)


def written() -> dict[Path, str]:
    """What every page and chart has to hold according to the results of record."""
    reports, past = tables.reports(), history.entries()
    texts = {path: path.read_text(encoding="utf-8") for path in PAGES}
    for name, table in {
        *((report["name"], tables.table(report)) for report in reports),
        *((report["name"] + tables.DETAILS, tables.details(report)) for report in reports),
        ("headline", headline.figures(reports)),
        ("history", history.table(past)),
        ("busy", busy.table(reports, tables.reports(busy.RESULTS))),
        *((beside.PREFIX + library, beside.table(reports, library)) for library in beside.LIBRARIES),
    }:
        texts = {path: fill(text, name, table) for path, text in texts.items()}
    return {**texts, headline.CHART: headline.chart(reports), history.CHART: history.chart(past)}


def show(folder: Path, names: Collection[str]) -> None:
    """Prints the tables of the named reports in the folder."""
    for report in tables.reports(folder, names):
        print(f"\n{tables.table(report)}\n\n{tables.details(report)}")


def main() -> None:
    """Rewrites the pages and charts that differ from the results of record."""
    for path, text in written().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: rewritten")


if __name__ == "__main__":
    main()
