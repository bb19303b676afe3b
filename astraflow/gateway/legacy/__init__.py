"""The published lane of weights: TCP pushes with a 16-byte header, deltas, a ZMQ message."""
