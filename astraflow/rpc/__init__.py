"""gRPC plumbing that knows no reinforcement learning: channels, servers, errors, auth, TLS."""
