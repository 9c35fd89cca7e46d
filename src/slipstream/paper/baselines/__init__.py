"""The methods that the paper is compared with: lossy ones, each by its own rule. No engine uses them."""
