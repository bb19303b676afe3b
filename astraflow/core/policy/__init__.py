"""One policy: its steps and versions, and the way of its samples from their issue to a batch."""
