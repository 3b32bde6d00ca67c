"""Causes of a mismatch, each by a signature of its own, and the verdict on a run."""
