"""What runs inside a server's process: the reader of updates, and where weights go.

The server's own interpreter imports this package, as `astraflow_plugins`, from an environment in
which nothing of astraflow is installed: its modules import the standard library, numpy, torch
and each other, and the adapters of one server that server.
"""
