"""Observers read rounds while they happen: the coloured explanation in the terminal is one."""
