"""Who may take part, how large the pool should be, what a run waits for, and its end."""
