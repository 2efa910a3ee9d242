"""Detects what is wrong with a run and proposes the key to change, without torch."""
