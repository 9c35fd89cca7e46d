"""Caches: what models remember of the texts that run together, with one length per row."""
