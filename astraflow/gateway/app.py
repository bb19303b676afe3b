"""The app: every endpoint on one gateway, with a page that explains them at /docs."""

from fastapi import FastAPI

from astraflow import __version__
from astraflow.gateway.edge.errors import add_errors
from astraflow.gateway.gateway import Gateway
from astraflow.gateway.pool_routes import pool_routes
from astraflow.gateway.trainer_routes import trainer_routes

_ABOUT = """
The endpoints of AstraFlow's published services, on a run of astraflow: an existing trainer or
RaaS joins it unmodified. The gateway keeps no truth of its own: it is a client of the hub's gRPC
contract.

**Bodies.** Answers are pickled dicts unless `Accept` names `application/json` (tensors as
`{dtype, shape, data}`, base64) or `application/vnd.safetensors`. Requests are JSON; pickled
ones are read with `--legacy-pickle` only, and by a reader that runs nothing.

**Errors** are `{"error": "a sentence that names what to do"}`.
"""


def make_app(gateway: Gateway) -> FastAPI:
    """Return the app of a gateway that was entered."""
    app = FastAPI(title="astraflow gateway", version=__version__, description=_ABOUT)
    add_errors(app)
    app.include_router(trainer_routes(gateway))
    app.include_router(pool_routes(gateway))
    return app
