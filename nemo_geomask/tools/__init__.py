"""Commands around training: one room each, any of which could be deleted without touching the core or the hosts."""
