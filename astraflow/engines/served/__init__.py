"""Engines that are servers: processes of their own, spoken to over HTTP on this host.

`ServedEngine` does what an engine must; a `Dialect` says how one make of server is asked for
it. Weights reach the server as files in shared memory, and what reads them there is
`astraflow.engines.plugins`, which the server's own interpreter imports.
"""
