"""The records and protocols that all packages share: laws, drafts, requests, rounds, draws, Scorers, drafters."""
