"""Pictures and sound beside a prompt: processors of checkpoints and what they make of a file."""
