"""Sandboxes: where programs run that nobody has read."""
