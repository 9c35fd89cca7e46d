"""The server: an OpenAI-compatible HTTP interface to one engine, which a thread of its own runs."""
