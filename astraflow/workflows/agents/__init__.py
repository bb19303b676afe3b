"""Agents of any make: what they say to a policy is captured as token ids where it is sampled."""
