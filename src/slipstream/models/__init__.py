"""Hugging Face models as Scorers: causal ones, encoder-decoders, and tables for tests."""
