"""Which experts a batch is trained through: those of the sampler, as far as it told them."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from astraflow.config.policies import RouterReplay
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.routes import UNROUTED
from astraflow.trainers.causal_model import CausalModel
from astraflow.trainers.peers import Peers
from astraflow.trainers.rows import TrainRows


def replayed(rows: TrainRows, model: CausalModel, choice: RouterReplay) -> TrainRows:
    """Return rows with the routes that training follows.

    Raises:
        AstraflowError: INVALID_FIELD when the model has no such experts, or when loss tokens have
            no route and the recipe requires them.
    """
    if choice == "never":
        return replace(rows, routed_experts=None)
    if rows.routed_experts is not None:
        model.require_routes(rows.routed_experts)
    missing = len(rows.loss) - _told_count(rows)
    if choice == "required" and missing:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"{missing} of {len(rows.loss)} loss tokens do not say which experts they went "
            "through; sample with an engine that tells, or set router_replay: told",
        )
    return rows


def replay_metrics(rows: TrainRows, model: CausalModel, peers: Peers) -> Mapping[str, float]:
    """Return which share of a batch's loss tokens takes the sampler's experts; dense: nothing."""
    if not model.has_routers:
        return {}
    told, count = peers.total(_told_count(rows)), peers.total(len(rows.loss))
    return {"mismatch/replayed_frac": told / max(1.0, count)}


def _told_count(rows: TrainRows) -> int:
    """Count the loss tokens for which the token before them, which predicts them, has a route."""
    if rows.routed_experts is None:
        return 0
    routes = rows.routed_experts[rows.loss.positions - 1]
    return int(np.count_nonzero((routes != UNROUTED).all(axis=(1, 2))))
