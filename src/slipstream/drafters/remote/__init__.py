"""Drafting on another machine: the frames, the connection, and the drafter that uses them."""
