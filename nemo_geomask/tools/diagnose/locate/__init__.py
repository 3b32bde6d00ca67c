"""Where the mismatch lies: since which step, in which range of a dimension, in which group."""
