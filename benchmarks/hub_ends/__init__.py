"""What benchmarks/hub.py is made of: the hub's process, its members, and what they do."""
