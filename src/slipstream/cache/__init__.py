"""Caches of models: the KV cache and recurrent states of the rows of a batch, with one length per row."""
