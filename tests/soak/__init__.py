"""Long runs and faults, checked as they go: ``python -m tests.soak`` (``make soak``)."""
