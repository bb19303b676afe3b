"""`astraflow raas drain`: lets a node finish what it holds and leave."""

from astraflow.client.control import ControlClient
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason


async def drain_member(run_dir: RunDir, name: str, *, grace_s: float | None) -> str:
    """Ask the hub of a run to drain a member; return its id.

    Args:
        run_dir: Of the run.
        name: Or id of the member.
        grace_s: Then its session is ended; None: no limit.

    Raises:
        AstraflowError: MEMBER_UNKNOWN; NOT_READY when the hub is gone.
    """
    endpoint = run_dir.read_endpoint()
    async with ControlClient(endpoint.address, token=endpoint.operator_token) as control:
        members = (await control.get_run()).members
        for member in members:
            if name in (member.name, member.member_id):
                await control.drain_member(member.member_id, grace_s=grace_s)
                return member.member_id
    known = ", ".join(member.name for member in members) or "none"
    raise AstraflowError(Reason.MEMBER_UNKNOWN, f"there is no member '{name}'; known: {known}")
