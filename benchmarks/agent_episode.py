"""The episode that an agent of a benchmark works on."""

from astraflow.workflows.agents.session import AgentServer
from astraflow.workflows.episode import Episode
from astraflow.workflows.ports import PolicyPort
from made_up import made_up_task


def episode_of(port: PolicyPort, door: AgentServer | None = None) -> Episode:
    """Return an episode in which one policy is sampled from, and that says nothing itself."""
    task = made_up_task(sampling={port.policy_id: port.sampling})
    return Episode(task=task, sample_index=0, policies={port.policy_id: port}, agent_server=door)
