"""The user's mistakes, told in one sentence."""


class InputError(ValueError):
    """The input is wrong; the message says what was given, what is allowed and which key to edit."""


def reason(error: BaseException) -> str:
    """The first sentence of another library's message, which may go on for pages."""
    lines = str(error).strip().splitlines()
    return lines[0].split(". ")[0].rstrip(".") if lines else type(error).__name__
