"""What is asked of members, and what comes of it: tasks, evaluations, batches, checkpoints."""
