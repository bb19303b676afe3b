"""astraflow: reinforcement learning of LLM agents, organised around data.

Importing this package is cheap: it loads neither torch nor grpc. Each part is imported
by its own name, such as `astraflow.client` or `astraflow.weights`.
"""

__version__ = "0.1.0"
