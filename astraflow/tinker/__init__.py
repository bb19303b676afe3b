"""Training and sampling for clients of Tinker's API: a trainer and an engine behind HTTP."""
