"""The processes at the ends of `benchmarks/fanout.py`."""
