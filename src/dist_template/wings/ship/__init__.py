"""Verbs after training: evaluate, export, serve, promote."""
