"""The embedded engine: torch on the CPU or one GPU, for small Hugging Face causal models.

One thread does all the work of torch; the event loop hands requests over and gets results
back, once per decode step. A sequence's tokens do not depend on what else is decoded:
randomness is counted by (seed, position), and the shapes are chosen so that in f32 on one
CPU thread even the last bit does not (see `shapes`).
"""

from astraflow.engines.embedded.engine import EmbeddedEngine
from astraflow.engines.tokenizer import FastTokenizer, load_tokenizer

__all__ = ["EmbeddedEngine", "FastTokenizer", "load_tokenizer"]
