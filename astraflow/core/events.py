"""Events: all that can happen to a run, with what it needs to be decided the same way again.

`Run.apply(event, now)` answers each with the type named in its docstring and raises
AstraflowError where the call cannot go on; an event that raised changed nothing. Secrets are
minted outside and carried in, so that a replay of the same events gives the same run. They are
in the modules beside this one, by what they speak of, and all imported from here.
"""

from astraflow.core.batch_events import BatchAcked, BatchEvent, BatchStreamOpened
from astraflow.core.prompt_events import (
    EvalCancelled,
    EvalCreated,
    EvalPromptsOffered,
    PromptEvent,
    PromptRequeued,
    PromptsOffered,
)
from astraflow.core.run_events import (
    HubRestarted,
    RunBroken,
    RunEvent,
    RunPaused,
    RunResumed,
    RunStopped,
    SaveRequested,
    Ticked,
)
from astraflow.core.session_events import (
    FailureReported,
    MemberDrained,
    MemberKeptAlive,
    MemberLeft,
    RaasJoined,
    SessionEvent,
    SessionSecrets,
    TrainerRegistered,
)
from astraflow.core.version_events import (
    PublishRequested,
    VersionEvent,
    VersionPublished,
    VersionReported,
)
from astraflow.core.work_events import (
    CreditGiven,
    RolloutArrived,
    RolloutRepeated,
    TaskFinished,
    TaskNacked,
    WorkEvent,
)

__all__ = [
    "BatchAcked",
    "BatchEvent",
    "BatchStreamOpened",
    "CreditGiven",
    "EvalCancelled",
    "EvalCreated",
    "EvalPromptsOffered",
    "Event",
    "FailureReported",
    "HubRestarted",
    "MemberDrained",
    "MemberKeptAlive",
    "MemberLeft",
    "PromptEvent",
    "PromptRequeued",
    "PromptsOffered",
    "PublishRequested",
    "RaasJoined",
    "RolloutArrived",
    "RolloutRepeated",
    "RunBroken",
    "RunEvent",
    "RunPaused",
    "RunResumed",
    "RunStopped",
    "SaveRequested",
    "SessionEvent",
    "SessionSecrets",
    "TaskFinished",
    "TaskNacked",
    "Ticked",
    "TrainerRegistered",
    "VersionEvent",
    "VersionPublished",
    "VersionReported",
    "WorkEvent",
]

Event = SessionEvent | WorkEvent | BatchEvent | VersionEvent | PromptEvent | RunEvent
