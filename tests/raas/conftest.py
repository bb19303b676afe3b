"""A small real engine, a puller of its weights and a few workflows."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import FinishReason, spans_of
from astraflow.core.tasks import (
    Prompt,
    RegisteredCode,
    RolloutTask,
    SamplingParams,
    TaskPurpose,
    VersionRange,
    WorkflowSpec,
)
from astraflow.core.updates import SwapReport, WeightUpdate
from astraflow.core.versions import VersionInfo
from astraflow.engines.protocol import EngineLoad, Generation
from astraflow.raas.node import NodeSettings, RaasNode
from astraflow.raas.policies import ServedModel
from astraflow.workflows.protocol import Score
from astraflow.workflows.registry import workflow

VOCABULARY = "0123456789"


class TinyTokenizer:
    """One token per digit."""

    def encode(self, text, *, add_special_tokens=False):
        return [VOCABULARY.index(letter) for letter in text]

    def decode(self, tokens):
        return "".join(VOCABULARY[token] for token in tokens)


class TinyEngine:
    """Samples digits by (seed, position, version); `gate` holds it between two tokens."""

    name = "tiny/1"
    max_context_token_count = 64

    def __init__(self):
        self.version = None
        self.pins = Counter()
        self.open = asyncio.Event()
        self.open.set()
        self.sampled = 0
        self.running = 0
        self.swaps = []
        self.refusals = []
        self.changed = asyncio.Condition()

    @property
    def pinned_versions(self):
        return frozenset(self.pins)

    async def until(self, claim):
        """Wait until a generation or a pin makes a claim true."""
        async with self.changed:
            await self.changed.wait_for(claim)

    async def _change(self):
        async with self.changed:
            self.changed.notify_all()

    async def generate(self, prompt, sampling, *, version=None):
        self.running += 1
        await self._change()
        try:
            return await self._generate(len(prompt), sampling, version)
        finally:
            self.running -= 1

    async def _generate(self, start, sampling, pinned):
        if pinned is not None and pinned != self.version and pinned not in self.pins:
            raise AstraflowError(Reason.VERSION_NOT_SERVED, f"version {pinned}")
        tokens, logprobs, versions = [], [], []
        for position in range(start, start + sampling.max_new_tokens):
            await self.open.wait()
            await asyncio.sleep(0)
            version = self.version if pinned is None else pinned
            rng = np.random.default_rng([sampling.seed or 0, position, version])
            weights = rng.random(len(VOCABULARY)) + 0.1
            shares = weights / weights.sum()
            token = int(rng.choice(len(VOCABULARY), p=shares))
            tokens.append(token)
            logprobs.append(np.log(shares[token]))
            versions.append(version)
            self.sampled += 1
        return Generation(
            tokens=np.array(tokens, np.int32),
            logprobs=np.array(logprobs, np.float32),
            version_spans=spans_of(np.array(versions, np.int64)),
            finish_reason=FinishReason.LENGTH,
        )

    async def swap(self, update):
        if self.refusals:
            raise self.refusals.pop(0)
        self.swaps.append(update)
        self.version = update.version
        return SwapReport(version=update.version, pause_s=0.001, inflight_count=self.running)

    async def pin(self, version):
        if version != self.version and version not in self.pins:
            raise AstraflowError(Reason.VERSION_NOT_SERVED, f"version {version}")
        self.pins[version] += 1
        await self._change()

    async def unpin(self, version):
        self.pins[version] -= 1
        if not self.pins[version]:
            del self.pins[version]

    def load(self):
        return EngineLoad(
            running_count=self.running,
            queued_count=0,
            sampled_token_count=self.sampled,
            kv_fraction=0.25,
            busy_s=0.0,
        )

    async def close(self):
        pass


@dataclass(frozen=True, kw_only=True)
class TinyPulled:
    update: WeightUpdate
    nbytes: int = 12
    duration: timedelta = timedelta(milliseconds=5)
    reports: tuple = ()


class TinyPuller:
    """Gets a version by its number alone; `open` holds it, `failures` let it fail."""

    def __init__(self, policy_id):
        self.policy_id = policy_id
        self.held = None
        self.tokens = []
        self.failures = []
        self.open = asyncio.Event()
        self.open.set()
        self.is_closed = False

    async def pull(self, target, known, transfer_token):
        await self.open.wait()
        self.tokens.append(transfer_token)
        if self.failures:
            raise self.failures.pop(0)
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


@workflow("test_digits")
class Digits:
    """Samples once; the reward is the first digit."""

    def __init__(self, options, scorer):
        pass

    async def run(self, episode):
        talk = episode.trajectory()
        talk.observe(episode.prompt.fields["prompt"])
        reply = await talk.sample()
        return Score(reward=float(reply.text[0]), metrics={"length": len(reply.text)})


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
        max_new_tokens=4,
    ):
        versions = VersionRange(min=minimum)
        if version is not None:
            versions = VersionRange(min=version, max=version)
        return RolloutTask(
            task_id=f"task{number}",
            group_id=f"group{number}",
            purpose=purpose,
            workflow_id=workflow_id,
            prompt=Prompt(prompt_id=f"train/{number}", data_set="train", fields={"prompt": "123"}),
            sample_indexes=tuple(range(samples)),
            versions={"solver": versions},
            sampling={"solver": SamplingParams(max_new_tokens=max_new_tokens, seed=7)},
            timeout=None if timeout_s is None else timedelta(seconds=timeout_s),
            eval_run_id="eval1" if purpose is TaskPurpose.EVAL else None,
        )

    return make


@pytest.fixture
def make_version():
    def make(version):
        return VersionInfo(
            policy_id="solver",
            version=version,
            layout_digest=b"l" * 32,
            content_digest=b"c" * 16,
            patches=(),
        )

    return make


@pytest.fixture
def engine_class():
    return TinyEngine


@pytest.fixture
def tokenizer_class():
    return TinyTokenizer


@pytest.fixture
async def engine():
    return TinyEngine()


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
            max_eval_count=4,
            codes=CODES,
            patience_s=5.0,
        ),
        models={"solver": ServedModel(engine=engine, tokenizer=TinyTokenizer())},
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
