"""Observers, which receive every round: the coloured explanation in the terminal is one."""
