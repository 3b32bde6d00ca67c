"""Sums over tokens, sequences and steps, with bootstrap replicates; the table of tokens; the limits of health."""
