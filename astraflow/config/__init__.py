"""Recipes: what a run is, read strictly from YAML."""
