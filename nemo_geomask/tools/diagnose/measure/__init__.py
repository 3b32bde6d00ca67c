"""What a table's tokens, sequences and steps add up to, with bootstrap replicates, and the limits of health."""
