"""The trainer's side: a mapping of arrays becomes a version, and goes where it can be had."""
