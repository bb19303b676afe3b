"""astraflow: reinforcement learning of LLM agents, organised around data.

Importing this package is cheap: it loads neither torch nor grpc. Each part is imported
by its own name, such as `astraflow.client` or `astraflow.weights`.
"""

import os

# A hub forks to write down its state, and gRPC must not begin anew in that copy. It reads this when
# it is loaded.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

__version__ = "0.1.0"
