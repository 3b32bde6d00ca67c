"""Search for the mismatch: since which step, and in which part of the data."""
