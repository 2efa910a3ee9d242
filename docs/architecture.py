"""Writes docs/figures/architecture.svg, the rooms of the library and who imports whom, from the
code:

    .venv/bin/python docs/architecture.py

The order and the words are ROOMS' of tests/test_house.py, the arrows are the imports (those inside
of functions too). A test fails when the figure is out of date.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.support import house  # noqa: E402
from tests.test_house import ORDER, ROOMS  # noqa: E402

FIGURE = ROOT / "docs" / "figures" / "architecture.svg"
# of a room, from one to the next, of the table
LEFT, WIDTH, HEIGHT, STEP, CELL = (12, 750, 34, 48, 26)
GRID = LEFT + WIDTH + 90
STYLE = """
text { font: 13px sans-serif; fill: #222 } .room { fill: #eef3fa; stroke: #3b6ea5 }
.name { font-weight: bold }
.next { stroke: #3b6ea5; stroke-width: 1.6; fill: none } .dot { fill: #3b6ea5 }
.line { stroke: #ccc }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd } .room { fill: #22304a } .line { stroke: #555 }
}
"""


def needed(arrows: house.Graph) -> list[tuple[str, str]]:
    """The arrows that remain when those are dropped that follow from two others."""
    return [
        (room, target)
        for room in ORDER
        for target in sorted(arrows[room], key=ORDER.index)
        if not any(target in arrows[other] for other in arrows[room])
    ]


def figure() -> str:
    arrows = house.rooms(ROOT / "src" / "dist_template")
    middle = {room: 90 + STEP * row for row, room in enumerate(ORDER)}
    column = {room: GRID + CELL * row for row, room in enumerate(ORDER)}
    parts = [f'<text x="{GRID - 12}" y="14">imports</text>']
    for room, y in middle.items():
        parts += [
            f'<line class="line" x1="{GRID - 12}" x2="{GRID + CELL * len(ORDER)}" y1="{y}" '
            f'y2="{y}"/>',
            f'<rect class="room" x="{LEFT}" y="{y - HEIGHT // 2}" width="{WIDTH}" '
            f'height="{HEIGHT}" rx="4"/>',
            f'<text class="name" x="{LEFT + 10}" y="{y + 5}">{room}</text>',
            f'<text x="{LEFT + 110}" y="{y + 5}">{escape(ROOMS[room])}</text>',
            f'<text transform="translate({column[room] + 4} 78) rotate(-60)">{room}</text>',
        ]
        parts += [
            f'<circle class="dot" cx="{column[target]}" cy="{y}" r="5"/>'
            for target in sorted(arrows[room])
        ]
    for room, target in needed(arrows):
        x, start, end = LEFT + WIDTH, middle[room] + 6, middle[target] - 6
        bend = x + 14 + 22 * (ORDER.index(target) - ORDER.index(room))
        curve = f"M{x} {start} C{bend} {start} {bend} {end} {x + 2} {end}"
        parts.append(f'<path class="next" marker-end="url(#tip)" d="{curve}"/>')
    size = f'width="{GRID + CELL * len(ORDER) + 40}" height="{middle["ground"] + 40}"'
    marker = '<marker id="tip" markerWidth="7" markerHeight="7" refX="6" refY="3.5" orient="auto">'
    tip = f'{marker}<path class="dot" d="M0 0L7 3.5L0 7z"/></marker>'
    title = "<title>Rooms of dist_template and their imports</title>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{title}'
    return "\n".join([head, f"<style>{STYLE}</style><defs>{tip}</defs>", *parts, "</svg>", ""])


if __name__ == "__main__":
    FIGURE.write_text(figure(), encoding="utf-8")
    print(f"wrote {FIGURE.relative_to(ROOT)}")
