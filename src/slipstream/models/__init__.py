"""Hugging Face models as Scorers: causal ones and encoder-decoders."""
