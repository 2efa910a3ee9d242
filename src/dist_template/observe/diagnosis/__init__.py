"""Detects what is wrong with a run and proposes the key to change: rules over history/, without torch."""
