"""Programs that are not trusted: each runs under a keeper that leaves nothing of it behind."""
