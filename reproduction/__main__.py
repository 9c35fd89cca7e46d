"""`python -m reproduction` makes the paper's tables and figures."""

from reproduction.cli import app
from slipstream.cli.app import main

main(app, "python -m reproduction")
