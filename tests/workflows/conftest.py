"""An engine that says what it is told to, and tasks to run with it."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from astraflow.core.ids import PolicyId, WorkflowId
from astraflow.core.rollouts import FinishReason, VersionSpan
from astraflow.core.tasks import SamplingParams
from astraflow.engines.protocol import Generation, Watch
from astraflow.raas.agents.endpoint import AgentEndpoint
from astraflow.testing import CharTokenizer, SmallEngine
from astraflow.workflows.episode import Episode
from astraflow.workflows.ports import PolicyPort
from astraflow.workflows.runner import LoadedWorkflow
from made_up import made_up_task

EOS = 3


class Characters:
    """One token per code point; 2 is the start, 3 the end."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [2, *map(ord, text)] if add_special_tokens else list(map(ord, text))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens if token > EOS)


@dataclass(kw_only=True)
class Parrot:
    """An engine with a script: texts to say in turn, or errors to raise."""

    script: Iterator[str | Exception]
    logprob: float = -0.5
    version: int = 4
    max_context_token_count: int = 64
    is_stuck: bool = False
    asked: list[tuple[list[int], SamplingParams, int | None]] = field(default_factory=list)
    name: str = "parrot/1"

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        version: int | None = None,
        watch: Watch | None = None,
    ) -> Generation:
        del watch
        self.asked.append((list(prompt), sampling, version))
        if self.is_stuck:
            await asyncio.Event().wait()
        said = next(self.script)
        if isinstance(said, Exception):
            raise said
        tokens = np.array([*map(ord, said), EOS][: sampling.max_new_tokens], np.int32)
        return Generation(
            tokens=tokens,
            logprobs=np.full(len(tokens), self.logprob, np.float32),
            version_spans=(VersionSpan(version=self.version, length=len(tokens)),),
            finish_reason=FinishReason.STOP if tokens[-1] == EOS else FinishReason.LENGTH,
        )


@pytest.fixture
def parrot() -> Callable[..., Parrot]:
    return lambda *script, **settings: Parrot(script=iter(script), **settings)


@pytest.fixture
def episode() -> Callable[..., Episode]:
    """Make an episode on scripted engines, by policy."""

    def make(
        *, fields: dict[str, Any] | None = None, timeout_s: float | None = None, **engines: Parrot
    ) -> Episode:
        sampling = SamplingParams(max_new_tokens=8, seed=11)
        task = made_up_task(
            {"prompt": "cab>", "answer": "abc"} if fields is None else fields,
            task_id="t7",
            sample_indexes=(0, 1, 2),
            sampling=dict.fromkeys(engines, sampling),
            timeout=None if timeout_s is None else timedelta(seconds=timeout_s),
        )
        ports = {
            PolicyId(name): PolicyPort(
                policy_id=PolicyId(name), engine=engine, tokenizer=Characters(), sampling=sampling
            )
            for name, engine in engines.items()
        }
        return Episode(task=task, sample_index=2, policies=ports)

    return make


@pytest.fixture
def loaded() -> Callable[..., LoadedWorkflow]:
    """Give a workflow object, or a bare function, a name in the run."""

    def make(run: Any) -> LoadedWorkflow:
        workflow = run if hasattr(run, "run") else type("Bare", (), {"run": staticmethod(run)})()
        return LoadedWorkflow(workflow_id=WorkflowId("w"), workflow=workflow, scorer_digest=b"d")

    return make


@pytest.fixture
async def door():
    """An endpoint that lets agents in, over real sockets."""
    endpoint = AgentEndpoint()
    yield endpoint
    await endpoint.close()


@pytest.fixture
def served_episode(door):
    """Make episodes whose policy answers as it is told, behind the door."""

    def make(fields, reply, *, max_new_tokens=8):
        engine = SmallEngine(answer=reply)
        engine.version = 1
        task = made_up_task(fields)
        port = PolicyPort(
            policy_id=PolicyId("solver"),
            engine=engine,
            tokenizer=CharTokenizer(),
            sampling=SamplingParams(max_new_tokens=max_new_tokens, seed=1),
        )
        return Episode(
            task=task, sample_index=0, policies={port.policy_id: port}, agent_server=door
        )

    return make
