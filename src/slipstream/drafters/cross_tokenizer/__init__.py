"""Drafts from models with another tokenizer, by common tokens or by re-encoding their text."""
