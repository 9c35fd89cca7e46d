"""Drafts copied from documents and from past responses."""
