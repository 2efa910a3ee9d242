"""What the user got wrong, told apart from what broke."""


class InputError(ValueError):
    """The message is one sentence: what was given, what is allowed, which key to edit."""
