"""Scorers of general use; each is found by its name in `registry`."""
