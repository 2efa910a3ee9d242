"""The page of habits shows what was seen, and nothing in it is wrong."""

from tests.lightning import seen
from tests.lightning.arms import RANKS
from tests.lightning.habits import HABITS, SUBJECTS
from tests.lightning.table import PAGE, written


def test_the_page_has_what_was_seen() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page), "python -m tests.lightning.table"


def test_each_cell_that_was_seen_is_as_its_habit_says() -> None:
    for name, habit in HABITS.items():
        for way in RANKS:
            verdict = seen.verdict(name, way)
            if verdict:
                assert verdict == seen.expected(habit, way), (name, way)


def test_no_two_subjects_have_a_class_of_one_name() -> None:
    """A habit names its classes, and would get the first."""
    own = []
    for subject in SUBJECTS.values():
        for name, value in vars(subject).items():
            if isinstance(value, type) and value.__module__ == subject.__name__:
                own.append(name)
    assert len(own) == len(set(own))
    assert len(HABITS) == sum(len(subject.HABITS) for subject in SUBJECTS.values())
