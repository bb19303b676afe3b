"""`astraflow save`: asks a live run for a checkpoint, and says what it is made of."""

import json
from dataclasses import asdict
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table

from astraflow.client.control import ControlClient
from astraflow.config.run_dir import RunDir
from astraflow.core.saves import SavedRun


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
    endpoint = run_dir.read_endpoint()
    async with ControlClient(endpoint.address, token=endpoint.operator_token) as control:
        saved, path = await control.save_run(name, timeout_s=timeout_s)
    if as_json:
        fields = asdict(saved) | {"save_time": saved.save_time.isoformat(), "path": path}
        print(json.dumps(fields), flush=True)  # noqa: T201 - the command's output
        return
    Console().print(_table(saved), f"{saved.checkpoint_id} is saved: {path}")


def _table(saved: SavedRun) -> Table:
    table = Table("policy", "step", "version", "groups in its buffer")
    for each in saved.policies:
        version = "-" if each.version is None else str(each.version)
        table.add_row(each.policy_id, str(each.step), version, str(each.fresh_group_count))
    return table
