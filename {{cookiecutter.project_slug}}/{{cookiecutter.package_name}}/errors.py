"""The user's mistakes, told in one sentence."""


class InputError(ValueError):
    """The input is wrong; the message says what was given, what is allowed and which key to edit."""


def first_line(error: BaseException) -> str:
    """Of another library's message; the error's type where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def reason(error: BaseException) -> str:
    """The first sentence of a message whose first line may go on for a page."""
    return first_line(error).split(". ")[0].rstrip(".")
