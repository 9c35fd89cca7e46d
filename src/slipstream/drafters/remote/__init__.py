"""A draft on another machine: frames, the connection, and the drafter that uses it."""
