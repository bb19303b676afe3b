"""A node's copy of its weights on disk."""
