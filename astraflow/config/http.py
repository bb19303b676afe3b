"""The HTTP gateway of a recipe."""

from pydantic import Field

from astraflow.config.services import Tls
from astraflow.config.strict import Name, Strict


class Http(Strict):
    """Endpoints for peers that speak AstraFlow's published HTTP; see http.md."""

    port: int | None = Field(default=None, ge=0, lt=1 << 16)
    """`astraflow run` starts a gateway on it; 0 takes a free one. Unset: it starts none."""
    host: str = "127.0.0.1"
    """On which the gateway listens, and under which peers dial back. Beyond loopback give it a
    token (ASTRAFLOW_HTTP_TOKEN) and `tls`, or a network in which everybody may train."""
    tls: Tls = Tls()
    """Of these endpoints; with `ca`, callers must show a certificate of it."""
    dial: tuple[str, ...] = ("127.0.0.0/8", "::1", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
    """Weight senders and RaaS that may be dialled: names, addresses and networks. The host that a
    request came from may be dialled too."""
    legacy_pickle: bool = False
    """Whether pickled requests are read, as existing peers send them; nothing in them is run."""
    trainers: tuple[Name, ...] = ()
    """Policies whose trainers come over HTTP: `astraflow run` starts none for them."""
    max_body_nbytes: int = Field(default=64 << 20, ge=1 << 10)
    """Of one request. One host may send so much at once, all together twice of it."""
    max_answer_nbytes: int = Field(default=128 << 20, ge=1 << 10)
    """Of one answer of a peer that is dialled, such as the rollouts of a RaaS."""
    max_weights_nbytes: int | None = Field(default=None, ge=1)
    """Of the weights that a sender names; unset: the memory of this machine."""
    body_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds in which all of a request must come."""
    batch_timeout_s: float = Field(default=3500.0, gt=0)
    """Seconds after which /batch says 504; peers wait for 3600."""
    transfer_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds for one transfer of weights, from or to a peer."""
    silence_s: float = Field(default=3600.0, gt=0)
    """A trainer that asks nothing for so long has gone, and what it held returns to the run."""
