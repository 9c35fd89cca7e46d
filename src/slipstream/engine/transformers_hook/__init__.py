"""The hook of transformers' own `generate`: `custom_generate=` with our rounds behind it."""
