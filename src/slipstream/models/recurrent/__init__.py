"""Models with recurrent states as Scorers: states are kept and taken back instead of keys and values."""
