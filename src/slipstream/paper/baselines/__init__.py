"""The methods that the paper is compared with, each by its own rule or with its own models. No engine uses them."""
