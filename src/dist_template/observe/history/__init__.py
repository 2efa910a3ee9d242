"""The files in a run's folder, without torch or Lightning; wings/history.py reads them into one
object."""
