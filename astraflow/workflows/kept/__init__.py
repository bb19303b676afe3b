"""Programs that are not trusted: each runs under a supervisor that leaves nothing of it behind."""
