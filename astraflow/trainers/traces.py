"""The trainer's part of a trace: the step that used a group, and the version that it made."""

from astraflow.core.batches import BatchHeader
from astraflow.telemetry.traces import is_tracing, record


def trace_step(
    header: BatchHeader, *, step: int, version: int | None, times_ns: tuple[int, int, int]
) -> None:
    """Record a step in the traces of all groups of its batch.

    Args:
        header: Of the batch.
        step: Optimizer steps done, this one included.
        version: What was published; None: nothing was after this step.
        times_ns: Unix times: the batch was there, the step was done, the version was published.
    """
    if not is_tracing():
        return
    began, stepped, published = times_ns
    for group in header.groups:
        record(
            "rl.train",
            parent=group.traceparent,
            start_ns=began,
            end_ns=stepped,
            group=group.group_id,
            batch=header.batch_id,
            policy=header.policy_id,
            step=step,
        )
        if version is not None:
            record(
                "rl.sync",
                parent=group.traceparent,
                start_ns=stepped,
                end_ns=published,
                policy=header.policy_id,
                version=version,
            )
