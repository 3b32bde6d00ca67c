"""Outputs of a verdict: terminal, JSON, HTML page and figures; and ``sweep``."""
