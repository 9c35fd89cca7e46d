"""Lossless speculative decoding for the models people already have."""

from slipstream.engine import Completion, Engine, Interrupted, Piece, load

__all__ = ["Completion", "Engine", "Interrupted", "Piece", "load"]
