"""A node with a small engine, a puller of its weights and a few workflows."""

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import (
    Prompt,
    RegisteredCode,
    SamplingParams,
    TaskPurpose,
    VersionRange,
    WorkflowSpec,
)
from astraflow.core.tensors import WeightUpdate
from astraflow.raas.node import NodeSettings, RaasNode
from astraflow.raas.policies import ServedModel
from astraflow.testing import CharTokenizer, SmallEngine
from astraflow.testing.recipes import one_turn
from astraflow.weights.fetch.puller import PullTimes
from astraflow.workflows.protocol import Score
from astraflow.workflows.registry import workflow
from made_up import made_up_task, made_up_version

DIGITS = "0123456789"


def make_engine():
    return SmallEngine(CharTokenizer(DIGITS), max_context_token_count=64)


@dataclass(frozen=True, kw_only=True)
class TinyPulled:
    update: WeightUpdate
    nbytes: int = 12
    duration: timedelta = timedelta(milliseconds=5)
    reports: tuple = ()
    times: PullTimes = PullTimes()  # noqa: RUF009 - frozen


class TinyPuller:
    """Gets a version by its number alone; `open` holds it, `failures` and `gone` let it fail."""

    def __init__(self, policy_id):
        self.policy_id = policy_id
        self.held = None
        self.tokens = []
        self.failures = []
        self.gone = set()
        self.open = asyncio.Event()
        self.open.set()
        self.is_closed = False

    async def pull(self, target, known, transfer_token, *, listed=None):
        await self.open.wait()
        self.tokens.append(transfer_token)
        if self.failures:
            raise self.failures.pop(0)
        if target.version in self.gone:
            raise AstraflowError(Reason.VERSION_EVICTED, "it is no longer kept")
        base, self.held = self.held, target.version
        return TinyPulled(update=self._update(base))

    def full_update(self):
        return self._update(None)

    def _update(self, base):
        return WeightUpdate(
            policy_id=self.policy_id, version=self.held, base_version=base, tensors=()
        )

    async def close(self):
        self.is_closed = True


workflow("test_digits")(
    one_turn(lambda text: Score(reward=float(text[0]), metrics={"length": len(text)}))
)


@workflow("test_raises")
class Raises:
    """A user's mistake."""

    def __init__(self, options, scorer):
        pass

    async def run(self, episode):
        raise ValueError("no such tool")


@workflow("test_hangs")
class Hangs:
    """Never ends."""

    def __init__(self, options, scorer):
        pass

    async def run(self, episode):
        await asyncio.Event().wait()


CODES = tuple(RegisteredCode(name=f"test_{name}") for name in ("digits", "raises", "hangs"))


@pytest.fixture
def make_task():
    def make(
        number=1,
        *,
        samples=2,
        workflow_id="digits",
        version=None,
        minimum=None,
        purpose=TaskPurpose.TRAIN,
        timeout_s=None,
        deadline=None,
        max_new_tokens=4,
    ):
        versions = VersionRange(min=minimum)
        if version is not None:
            versions = VersionRange(min=version, max=version)
        return made_up_task(
            task_id=f"task{number}",
            group_id=f"group{number}",
            purpose=purpose,
            workflow_id=workflow_id,
            prompt=Prompt(prompt_id=f"train/{number}", data_set="train", fields={"prompt": "123"}),
            sample_indexes=tuple(range(samples)),
            versions={"solver": versions},
            sampling={"solver": SamplingParams(max_new_tokens=max_new_tokens, seed=7)},
            timeout=None if timeout_s is None else timedelta(seconds=timeout_s),
            deadline=deadline,
            eval_run_id="eval1" if purpose is TaskPurpose.EVAL else None,
        )

    return make


@pytest.fixture
def make_version():
    return partial(made_up_version, "solver")


@pytest.fixture
async def engine():
    return make_engine()


@pytest.fixture
async def puller():
    return TinyPuller("solver")


@pytest.fixture
async def node(fake_hub, engine, puller):
    """A node of the fake hub that was not started; version 0 is published."""
    fake_hub.workflows = tuple(
        WorkflowSpec(workflow_id=code.name[5:], code=code, policy_ids=("solver",)) for code in CODES
    )
    return RaasNode(
        NodeSettings(
            hub=fake_hub.address,
            token="join-secret",
            name="raas-1",
            capacity=8,
            eval_extra=1,
            codes=CODES,
            patience_s=5.0,
        ),
        models={"solver": ServedModel(engine=engine, tokenizer=CharTokenizer(DIGITS))},
        puller=lambda policy_id: puller,
    )


@pytest.fixture
async def running(fake_hub, node, make_version):
    """A node that serves version 0; stopped at the end."""
    fake_hub.publish(make_version(0))
    async with asyncio.TaskGroup() as group:
        departure = group.create_task(node.run())
        await fake_hub.until(lambda: fake_hub.reports and fake_hub.credits)
        yield departure
        node.stop()
