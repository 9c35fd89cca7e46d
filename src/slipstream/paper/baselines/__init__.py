"""Methods of other papers to compare with, each with its own rule or its own models; engines do not use them."""
