"""Measurements that people run on their own machines, links and weights."""
