"""The user's mistakes, told in one sentence."""


class InputError(ValueError):
    """The input is wrong; the message says what was given, what is allowed and which key to edit."""
