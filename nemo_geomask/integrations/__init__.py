"""Adapters to the hosts; each is imported only when used."""
