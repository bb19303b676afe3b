"""The episode that an agent of a benchmark works on."""

from astraflow.core.ids import GroupId, PromptId, TaskId, WorkflowId
from astraflow.core.tasks import Prompt, RolloutTask, TaskPurpose
from astraflow.workflows.agents.session import AgentServer
from astraflow.workflows.episode import Episode
from astraflow.workflows.ports import PolicyPort


def episode_of(port: PolicyPort, door: AgentServer | None = None) -> Episode:
    """Return an episode in which one policy is sampled from, and that says nothing itself."""
    task = RolloutTask(
        task_id=TaskId("t"),
        group_id=GroupId("g"),
        purpose=TaskPurpose.TRAIN,
        workflow_id=WorkflowId("w"),
        prompt=Prompt(prompt_id=PromptId("p"), data_set="train", fields={}),
        sample_indexes=(0,),
        versions={},
        sampling={port.policy_id: port.sampling},
    )
    return Episode(task=task, sample_index=0, policies={port.policy_id: port}, agent_server=door)
