"""Methods of other papers to compare with, each with its own rule or its own models; no engine uses them."""
