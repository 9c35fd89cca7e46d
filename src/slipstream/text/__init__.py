"""Text: prompts and documents from files, answers to files, and tokens converted to text as they are emitted."""
