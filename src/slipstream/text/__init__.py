"""Text: prompts and documents that are read, and tokens that become text while they come."""
