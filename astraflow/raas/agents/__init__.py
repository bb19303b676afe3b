"""The OpenAI-compatible endpoint: agents of any make sample from the policies of a node."""
