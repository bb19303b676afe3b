"""The bridge: a RaaS that speaks the published HTTP is a member of the pool."""
