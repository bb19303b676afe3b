"""The HTTP gateway of a recipe."""

from pydantic import Field

from astraflow.config.strict import Name, Strict


class Http(Strict):
    """Endpoints for peers that speak AstraFlow's published HTTP; see http.md."""

    port: int | None = Field(default=None, ge=0, lt=1 << 16)
    """`astraflow run` starts a gateway on it; 0 takes a free one. Unset: it starts none."""
    host: str = "127.0.0.1"
    """On which the gateway listens, and under which peers dial back. It asks nobody for a token."""
    legacy_pickle: bool = False
    """Whether pickled requests are read, as existing peers send them; nothing in them is run."""
    trainers: tuple[Name, ...] = ()
    """Policies whose trainers come over HTTP: `astraflow run` starts none for them."""
    max_body_nbytes: int = Field(default=256 << 20, ge=1 << 10)
    """Of one request."""
    body_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds in which all of a request must come."""
    batch_timeout_s: float = Field(default=3500.0, gt=0)
    """Seconds after which /batch says 504; peers wait for 3600."""
    transfer_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds for one transfer of weights, from or to a peer."""
    silence_s: float = Field(default=3600.0, gt=0)
    """A trainer that asks nothing for so long has gone, and what it held returns to the run."""
