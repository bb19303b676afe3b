"""Inference engines: what generates tokens. Heavy imports stay inside each engine."""
