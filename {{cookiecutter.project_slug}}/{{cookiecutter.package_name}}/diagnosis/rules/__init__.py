"""The rules, by what they look at. Importing this registers all of them with diagnosis/engine.py."""
