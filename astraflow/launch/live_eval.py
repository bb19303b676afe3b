"""`astraflow eval --live`: the run itself measures a version beside training."""

from collections.abc import Callable, Mapping

from astraflow.client.control import ControlClient
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.evals import EvalRun, EvalState
from astraflow.core.ids import PolicyId


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
    endpoint = run_dir.read_endpoint()
    async with ControlClient(endpoint.address, token=endpoint.operator_token) as control:
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
