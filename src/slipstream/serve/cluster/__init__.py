"""The server on a Ray cluster: how many replicas there are, which of them is asked, and their common life."""
