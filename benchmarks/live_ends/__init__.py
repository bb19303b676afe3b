"""The processes of benchmarks/publish_to_live.py: hub and trainer near, a node far away."""
