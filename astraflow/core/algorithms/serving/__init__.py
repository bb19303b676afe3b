"""Batch serving: what is replayed, and which batches are refused."""
