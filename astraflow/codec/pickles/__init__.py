"""Published binary bodies: pickles, read by an interpreter of our own, and written by hand.

Nothing here imports, looks up or calls what a body names: names are keys of a table.
"""

from astraflow.codec.pickles.reading import read_pickle
from astraflow.codec.pickles.writing import pickle_chunks

__all__ = ["pickle_chunks", "read_pickle"]
