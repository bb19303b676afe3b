"""Trainers: batches become optimizer steps, and every step a version of the weights."""
