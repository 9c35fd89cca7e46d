"""Drafts that read a target's hidden states (EAGLE-3, multi-token prediction, DFlash) as Scorers."""
