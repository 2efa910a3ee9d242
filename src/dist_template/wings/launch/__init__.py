"""Renders and submits a run to any launcher or scheduler, from one description of its machines."""
