"""The two ends of benchmarks/wan.py: what sends 50 MB, and what asks for them."""
