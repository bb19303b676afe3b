"""Versions as patches: layouts, routes, what is stored, and what they make of a state."""
