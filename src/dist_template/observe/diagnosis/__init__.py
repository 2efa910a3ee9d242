"""What went wrong with a run, and which key to change: rules over history/, without torch or Lightning."""
