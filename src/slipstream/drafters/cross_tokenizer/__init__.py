"""Drafts from models with another tokenizer, by common tokens or by way of the text."""
