"""The runs behind the paper's tables: acceptance along texts, speeds, quality."""
