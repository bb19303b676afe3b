"""What an operator asks of a live run: a checkpoint, a node to drain, an evaluation."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table

from astraflow.client.control import ControlClient
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.evals import EvalRun, EvalState
from astraflow.core.ids import MemberId, PolicyId
from astraflow.rpc.access import token_id_of


async def save_run(
    run_dir: RunDir, *, checkpoint_id: str | None, timeout_s: float, as_json: bool
) -> None:
    """Save a run, and print what was saved.

    Args:
        run_dir: Of the run.
        checkpoint_id: None: by the time of day.
        timeout_s: For the slowest trainer.
        as_json: For machines.

    Raises:
        AstraflowError: NOT_READY when no hub of this run can be reached, a trainer is missing, or
            one has not saved in time; INVALID_FIELD, RUN_ENDED.
    """
    name = checkpoint_id or f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    async with ControlClient.of(run_dir) as control:
        saved, path = await control.save_run(name, timeout_s=timeout_s)
    if as_json:
        fields = asdict(saved) | {"save_time": saved.save_time.isoformat(), "path": path}
        print(json.dumps(fields), flush=True)  # noqa: T201 - the command's output
        return
    table = Table("policy", "step", "version", "groups in its buffer")
    for each in saved.policies:
        version = "-" if each.version is None else str(each.version)
        table.add_row(each.policy_id, str(each.step), version, str(each.fresh_group_count))
    Console().print(table, f"{saved.checkpoint_id} is saved: {path}")


async def drain_member(run_dir: RunDir, name: str, *, grace_s: float | None) -> str:
    """Ask the hub of a run to drain a member; return its id.

    Args:
        run_dir: Of the run.
        name: Or id of the member.
        grace_s: Then its session is ended; None: no limit.

    Raises:
        AstraflowError: MEMBER_UNKNOWN; NOT_READY when the hub is gone.
    """
    async with ControlClient.of(run_dir) as control:
        members = (await control.get_run()).members
        for member in members:
            if name in (member.name, member.member_id):
                await control.drain_member(member.member_id, grace_s=grace_s)
                return member.member_id
    known = ", ".join(member.name for member in members) or "none"
    raise AstraflowError(Reason.MEMBER_UNKNOWN, f"there is no member '{name}'; known: {known}")


async def revoke_token(run_dir: RunDir, token: str) -> list[MemberId]:
    """Have the hub of a run take a token of a role back; return whose sessions have ended.

    Args:
        run_dir: Of the run.
        token: Or its id.

    Raises:
        AstraflowError: INVALID_FIELD for what is neither; NOT_READY when the hub is gone.
    """
    async with ControlClient.of(run_dir) as control:
        return await control.revoke_token(token_id_of(token))


async def evaluate_live(
    run_dir: RunDir,
    suite: str,
    *,
    versions: Mapping[PolicyId, int],
    pool_share: float | None,
    note: Callable[[EvalRun], None],
) -> EvalRun:
    """Ask the hub of a run for an evaluation, and wait for its end.

    Args:
        run_dir: Of the run.
        suite: Of its recipe.
        versions: To measure; a policy left out: its newest.
        pool_share: Of the pool's capacity, at most; None: the recipe's.
        note: Called with each change.

    Raises:
        AstraflowError: EVAL_UNKNOWN, VERSION_UNKNOWN, VERSION_EVICTED, VERSION_NOT_SERVED,
            RUN_ENDED; NOT_READY when the hub is gone; why the evaluation failed.
    """
    async with ControlClient.of(run_dir) as control:
        asked = last = await control.evals.create(suite, versions=versions, pool_share=pool_share)
        async for seen in control.evals.watch(asked.eval_run_id):
            note(seen)
            last = seen
    if last.state is not EvalState.SUCCEEDED:
        failure = last.failure
        raise AstraflowError(
            failure.reason if failure else Reason.RUN_ENDED,
            f"the evaluation {last.state}" + (f": {failure.message}" if failure else ""),
        )
    return last
