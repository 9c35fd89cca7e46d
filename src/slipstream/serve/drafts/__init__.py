"""The server of drafts, and the clients that share one: rows, builds and its socket."""
