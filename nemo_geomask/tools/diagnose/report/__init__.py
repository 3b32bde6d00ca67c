"""What users get of a verdict: terminal, JSON, HTML page and figures; and ``sweep``."""
