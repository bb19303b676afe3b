"""The HTTP gateway: AstraFlow's published endpoints, for existing peers, on the gRPC contract."""
