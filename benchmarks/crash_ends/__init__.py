"""A run whose processes are killed, and how it is judged."""
