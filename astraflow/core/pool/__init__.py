"""Who takes part: sessions of members, what each can take, and from whom weights come."""
