"""The page of habits shows what was seen, and nothing in it is wrong."""

from tests.lightning import seen
from tests.lightning.arms import RANKS
from tests.lightning.habits import HABITS
from tests.lightning.table import PAGE, written


def test_the_page_has_what_was_seen() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page), "python -m tests.lightning.table"


def test_each_cell_that_was_seen_is_as_its_habit_says() -> None:
    cells = [(name, way) for name in HABITS for way in RANKS if seen.verdict(name, way)]
    found = {cell: seen.verdict(*cell) for cell in cells}
    assert found == {(name, way): seen.expected(HABITS[name], way) for name, way in cells}
