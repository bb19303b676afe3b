"""Lanes: ways for chunks to travel. They know nothing of reinforcement learning."""
