"""What the gateway is told: the run, its recipe, its limits."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from astraflow.config.pool import Http
from astraflow.config.recipe import Recipe
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.engines.devices import whole_memory
from astraflow.engines.models import first_model
from astraflow.gateway.http import BodyRules
from astraflow.rpc.peers import DialRules
from astraflow.rpc.tls import Tls

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """What the gateway is.

    Attributes:
        operator_token: For /status, /raas_pool and /shutdown; None: these are not served.
        models: Directory of a policy's first weights; a policy left out: a trainer brings them.
        http_token: That callers show; empty: they show none.
        tls: Of the hub; None: plain text.
    """

    recipe: Recipe
    hub: str
    token: str = field(repr=False)
    operator_token: str | None = field(default=None, repr=False)
    models: Mapping[PolicyId, Path] = field(default_factory=dict[PolicyId, Path])
    rules: BodyRules = field(default_factory=BodyRules)
    dial: DialRules = field(default_factory=DialRules)
    http_token: str = field(default="", repr=False)
    tls: Tls | None = None

    @property
    def policy_ids(self) -> tuple[PolicyId, ...]:
        """Of the recipe, in its order."""
        return tuple(map(PolicyId, self.recipe.policies))


def policy_of(model_id: str | None, known: Sequence[PolicyId]) -> PolicyId:
    """Return the policy of a model_id; of none, or of `default`, the only one."""
    if model_id in (None, "default") and len(known) == 1:
        return known[0]
    if model_id is None or model_id not in known:
        raise AstraflowError(
            Reason.POLICY_UNKNOWN, f"model_id {model_id} is none of {', '.join(known)}"
        )
    return PolicyId(model_id)


def model_index(policy_id: PolicyId, policy_ids: Sequence[PolicyId]) -> int:
    """Return the number in `model<digits>`, which existing services go by, or else its place."""
    named = re.fullmatch(r"model(\d+)", policy_id)
    return int(named[1]) if named else list(policy_ids).index(policy_id)


def first_models(recipe: Recipe, given: Mapping[str, Path]) -> dict[PolicyId, Path]:
    """Return where the first weights of policies lie; one that a trainer brings is left out."""
    found = {
        PolicyId(name): given.get(name) or first_model(policy.model, report=log.info)
        for name, policy in recipe.policies.items()
    }
    return {name: directory for name, directory in found.items() if directory is not None}


def rules_of(http: Http) -> BodyRules:
    """Return what a recipe says of bodies."""
    return BodyRules(
        reads_pickles=http.legacy_pickle,
        max_nbytes=http.max_body_nbytes,
        timeout_s=http.body_timeout_s,
    )


def dial_of(http: Http, tls: Tls | None = None) -> DialRules:
    """Return what a recipe says of peers that are dialled."""
    is_plain = (tls is None or tls.is_plain) and tls_of(http) is None
    return DialRules(
        hosts=http.dial,
        max_answer_nbytes=http.max_answer_nbytes,
        max_weights_nbytes=http.max_weights_nbytes or whole_memory(),
        clear_weights=is_plain or http.clear_weights,
    )


def tls_of(http: Http) -> Tls | None:
    """Return what a recipe says of TLS on the endpoints; None: plain text.

    Raises:
        AstraflowError: INVALID_FIELD for a certificate without its key.
    """
    tls = Tls.of(http.tls.model_dump())
    return None if tls.is_plain else tls


def url_of(http: Http, address: str) -> str:
    """Return the URL of the endpoints that are served at host:port."""
    return f"{'http' if tls_of(http) is None else 'https'}://{address}"
