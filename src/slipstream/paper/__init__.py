"""The paper's tables and figures from our own runs."""
