"""Rollout filters: what of a whole group is trained on."""
