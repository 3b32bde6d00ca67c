"""What ``diagnose`` finds in synthetic runs with planted faults."""
