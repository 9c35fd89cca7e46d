"""The parts of `recipes/chat_draft.py`."""
