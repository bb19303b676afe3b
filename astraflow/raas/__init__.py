"""Rollout as a service: a node that runs workflows on inference engines for a run."""
