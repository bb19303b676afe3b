"""A node of ours as one RaaS of an existing Dataflow, over the published HTTP endpoints."""
