"""What `faults.py` injects, and how it judges what came of it."""
