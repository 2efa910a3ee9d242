"""The table of habits with their verdicts, for docs/habits.md.

`python -m tests.lightning.table` writes it from what was seen (seen.py)."""

from pathlib import Path

from tests.lightning import seen
from tests.lightning.arms import RANKS, Habit
from tests.lightning.habits import SUBJECTS

PAGE = Path(__file__).parents[2] / "docs" / "habits.md"
BEGIN, END = "<!-- table: python -m tests.lightning.table -->", "<!-- end of the table -->"
NOT_RUN = "–"
TITLES = {
    "flags": "Flags and callbacks",
    "loaders": "Loaders",
    "schedules": "Optimizers, schedules, gradients",
    "state": "Hooks, metrics, state",
    "reported": "Further public reports",
}


def table() -> str:
    """Returns the page's part that is generated."""
    parts = []
    for subject, title in TITLES.items():
        ways = [way for way in RANKS if way != "ddp3" or subject == "loaders"]
        rows = [f"## {title}", ""]
        rows += [f"| habit | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
        notes = []
        for name, habit in SUBJECTS[subject].HABITS.items():
            cells = [seen.verdict(name, way) or NOT_RUN for way in ways]
            rows.append(f"| {name.replace('_', ' ')} | {' | '.join(cells)} |")
            notes += _notes(name.replace("_", " "), habit)
        parts += [*rows, "", *notes, ""] if notes else [*rows, ""]
    return "\n".join(parts)


def _notes(name: str, habit: Habit) -> list[str]:
    """Returns why a habit's training differs, and with which sentence it is refused."""
    ways = f" ({', '.join(habit.differs)})" if habit.differs else ""
    notes = [f"- **{name}**{ways}: {habit.why}."] if habit.why else []
    for sentence in dict.fromkeys(habit.refused.values()):
        refused = [way for way in habit.refused if habit.refused[way] == sentence]
        notes.append(f"- **{name}** ({', '.join(refused)}): “… {sentence} …”")
    return notes


def written(page: str) -> str:
    """Returns the page with the table of today."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
