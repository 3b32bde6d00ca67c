"""What records say of a run."""
