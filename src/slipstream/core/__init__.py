"""The nouns that all rooms share: laws, drafts, verdicts, requests, rounds, draws, and the protocols between rooms."""
