"""Habits of people who train with Lightning, by plain Lightning and by this library, compared."""
