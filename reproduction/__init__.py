"""The paper's tables and figures, reproduced from our own runs."""
