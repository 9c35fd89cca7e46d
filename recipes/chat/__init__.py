"""The parts of `recipes/phrases.py`."""
