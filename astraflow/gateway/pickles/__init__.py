"""Published binary bodies: pickles, read by an interpreter of our own, and written by hand.

Nothing here imports, looks up or calls what a body names: names are keys of a table.
"""

from astraflow.gateway.pickles.reading import read_pickle
from astraflow.gateway.pickles.writing import pickle_chunks

__all__ = ["pickle_chunks", "read_pickle"]
