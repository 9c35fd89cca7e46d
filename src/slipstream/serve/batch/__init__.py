"""`slipstream batch`: files of prompts in, files of answers out, in a run that can be interrupted at any moment."""
