"""Draws the pictures of the documents: `python docs/assets/pictures.py` rewrites the SVG files beside it.

The colours follow the reader's choice of light or dark, and lines and text stand out on either.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

STYLE = """<style>
  svg { --ink: #1f2328; --soft: #59636e; --step: #dbe9f9; --edge: #2f6fb5; --end: #fde3c8; --rim: #b35900; }
  @media (prefers-color-scheme: dark) {
    svg { --ink: #e6edf3; --soft: #9da7b3; --step: #17324f; --edge: #6cb0f5; --end: #4a2c0a; --rim: #f0a35e; }
  }
  text { fill: var(--ink); font: 14px system-ui, sans-serif; }
  .soft { fill: var(--soft); font-size: 13px; }
  .mono { font-family: ui-monospace, monospace; font-size: 13px; }
  .middle { text-anchor: middle; }
  .last { text-anchor: end; }
  .step { fill: var(--step); stroke: var(--edge); }
  .end { fill: var(--end); stroke: var(--rim); }
  .new { fill: none; stroke: var(--edge); stroke-dasharray: 4 3; }
  .line { fill: none; stroke: var(--soft); stroke-width: 1.5; }
  .frame { fill: none; stroke: var(--soft); stroke-dasharray: 6 4; }
  .head { fill: var(--soft); }
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">
  <path class="head" d="M0 0 8 4 0 8z"/></marker></defs>"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """A line of text that starts at x, unless ``kind`` says that it ends or has its middle there."""
    return (
        f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'
        if kind
        else f'<text x="{x:g}" y="{y:g}">{words}</text>'
    )


def box(x: float, y: float, width: float, height: float, words: str, kind: str) -> str:
    """A box with words in its middle."""
    label = text(x + width / 2, y + height / 2 + 5, words, "mono middle") if words else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>{label}'


def line(points: str, arrow: bool = True) -> str:
    """A line through points, as the path of an SVG has them."""
    head = ' marker-end="url(#head)"' if arrow else ""
    return f'<path class="line" d="{points}"{head}/>'


def brace(x: float, y: float, width: float, words: str) -> str:
    """A brace below something, with words under its middle."""
    return line(f"M{x:g} {y:g}v8h{width:g}v-8", arrow=False) + text(x + width / 2, y + 28, words, "soft middle")


def picture(name: str, title: str, width: int, height: int, parts: Iterable[str]) -> None:
    """Write one file."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    lines = [f'{head} role="img" aria-label="{title}">', f"<title>{title}</title>", STYLE, *parts, "</svg>", ""]
    Path(__file__).with_name(f"{name}.svg").write_text("\n".join(lines), encoding="utf-8")


W, H = 58, 34
"""The width and height of a row."""


def at(i: int) -> int:
    """Where row i begins."""
    return 20 + i * (W + 6)


def spread(i: int) -> int:
    """The same for rows with arrows in between."""
    return 170 + i * (W + 40)


def rows(y: float, words: str) -> list[str]:
    """Rows side by side: B is a boundary row, a name in brackets the newest step, all others are steps."""
    kinds = {"B": "end", "(": "new"}
    return [box(at(i), y, W, H, word.strip("()"), kinds.get(word[0], "step")) for i, word in enumerate(words.split())]


def ring() -> None:
    """The ring of one env."""
    picture(
        "ring", "The ring of one environment: two episodes with a boundary row after each end, and the newest step",
        680, 186,
        [
            text(20, 24, "the ring of one environment, in the order of time", "soft"),
            *rows(66, "s7 s8 B s0 s1 s2 B s0 s1 (s2)"),
            text(at(2) + W / 2, 54, "final observation", "soft middle"),
            text(at(6) + W / 2, 54, "final observation", "soft middle"),
            text(at(9) + W, 54, "newest step", "soft last"),
            brace(at(0), 106, 2 * W + 6, "an older episode"),
            brace(at(3), 106, 3 * W + 12, "one whole episode"),
            brace(at(7), 106, 3 * W + 12, "the running episode"),
            line(f"M{at(9) + W + 2:g} 83h12v92H8v-92h10"),
            text(340, 164, "full: the next step takes the place of the oldest row", "soft middle"),
        ],
    )  # fmt: skip


def window() -> None:
    """Two n-step windows."""
    picture(
        "n-step-window", "Two windows of three steps: one within an episode, one cut short where the episode ends",
        680, 220,
        [
            text(20, 24, "windows of n = 3 steps", "soft"),
            *rows(86, "s0 s1 s2 s3 s4 s5 s6 B s0 s1"),
            f'<rect x="{at(1) - 4:g}" y="80" width="{3 * W + 20:g}" height="46" rx="6" class="frame"/>',
            f'<rect x="{at(5) - 4:g}" y="80" width="{2 * W + 14:g}" height="46" rx="6" class="frame"/>',
            text(at(1), 48, "anchor s1: 3 rewards", ""),
            text(at(1), 68, "discount γ³", "mono"),
            text(at(5), 48, "anchor s5: 2 rewards", ""),
            text(at(5), 68, "discount γ², or 0 if s6 terminated", "mono"),
            line(f"M{at(2) + W / 2:g} 130v26H{at(4) + W / 2:g}V124"),
            text(at(3) - 3, 174, "next_obs", "mono middle"),
            line(f"M{at(6) - 3:g} 130v26H{at(7) + W / 2:g}V124"),
            text(at(6) + W + 3, 174, "next_obs", "mono middle"),
            text(20, 206, "A window never reads beyond the boundary row B: the next episode begins behind it.", "soft"),
        ],
    )  # fmt: skip


def boundary() -> None:
    """What an env returns at an end, and the rows of it."""
    picture(
        "boundary-row",
        "An episode that is cut after three steps: the environment, the rows of a replay, and the values",
        680, 262,
        [
            text(20, 42, "the environment"),
            *(box(spread(i), 20, W, H, f"{obs}", "step") for i, obs in enumerate((0, 1, 2))),
            box(spread(3), 20, W, H, "3", "end"), box(spread(4), 20, W, H, "10", "step"),
            *(line(f"M{spread(i) + W + 3:g} 37h{34:g}") for i in range(3)),
            line(f"M{spread(3) + W + 3:g} 37h34"),
            text(spread(3) + W + 20, 74, "reset", "soft middle"),
            text(spread(2) + W + 20, 74, "truncated", "soft middle"),
            text(20, 132, "the replay's rows"),
            *(box(spread(i), 110, W, H, f"{obs}", "step") for i, obs in enumerate((0, 1, 2))),
            box(spread(3), 110, W, H, "3", "end"), box(spread(4), 110, W, H, "10", "step"),
            *(line(f"M{spread(i) + W / 2:g} 56v50") for i in range(5)),
            text(spread(3) + W / 2, 164, "boundary row:", "soft middle"),
            text(spread(3) + W / 2, 182, "no action, no reward", "soft middle"),
            text(20, 222, "the value after it"),
            *(text(spread(i) + W / 2, 222, words, "mono middle") for i, words in enumerate(("V(1)", "V(2)", "V(3)"))),
            text(spread(4) + W / 2, 222, "V(11)", "mono middle"),
            text(spread(3) + W / 2, 222, "–", "soft middle"),
            text(20, 246, "If the step out of 2 terminated the task, its value is 0, and 3 is not read.", "soft"),
        ],
    )  # fmt: skip


def lane() -> None:
    """Actors, their lanes, and the owner of a replay."""
    parts: list[str] = [
        text(80, 24, "actors", "soft middle"), text(330, 24, "lanes, in shared memory", "soft middle"),
        text(590, 24, "owner", "soft middle"),
    ]  # fmt: skip
    for k, filled in enumerate((5, 2, 7)):
        y = 44 + 62 * k
        parts += [
            box(20, y, 120, 42, f"process {k}", "step"),
            line(f"M146 {y + 21}h46"),
            text(168, y + 14, "add", "soft middle"),
        ]
        parts += [box(200 + 28 * i, y + 5, 24, 32, "", "step" if i >= 9 - filled else "new") for i in range(9)]
        parts += [line(f"M456 {y + 21}L514 {115 + 16 * (k - 1)}")]
    parts += [
        box(520, 44, 140, 166, "", "end"),
        text(590, 104, "drain", "mono middle"), text(590, 128, "ReplayBuffer", "mono middle"),
        text(590, 152, "sample", "mono middle"),
        text(340, 244, "Each actor has a lane of its own. Nothing is pickled, and nobody takes a lock.", "soft middle"),
    ]  # fmt: skip
    title = "Three actors write steps to their lanes in shared memory; the owner drains them into a replay"
    picture("lanes", title, 680, 260, parts)


if __name__ == "__main__":
    for draw in (ring, window, boundary, lane):
        draw()
