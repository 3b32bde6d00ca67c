"""Objectives, each with its settings, formula and function; importing them needs no torch."""
