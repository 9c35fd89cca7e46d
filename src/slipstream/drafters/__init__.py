"""Drafters: who makes the drafts. One file per kind."""
