"""The engine that users hold: loading, prompts to requests, completions and streams, and transformers' own hook."""
