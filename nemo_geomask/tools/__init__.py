"""Commands around training: one package each. Any of them can be deleted without a change to the core or the hosts."""
