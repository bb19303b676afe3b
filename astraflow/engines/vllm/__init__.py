"""vLLM as an engine: a real server, updated in place.

`astraflow.engines.plugins.vllm_worker` is its part inside the server's process.
"""
