"""Published binary bodies: pickles, read by an interpreter of our own, and written by hand.

Nothing here imports, looks up or calls what a body names: names are keys of a table.
"""

from astraflow.codec.pickles.bodies import pickle_chunks, read_pickle

__all__ = ["pickle_chunks", "read_pickle"]
