"""Small stand-ins for the paper's models: their corpora, training and files."""
