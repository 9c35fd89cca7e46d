"""Training drafts on a frozen target."""
