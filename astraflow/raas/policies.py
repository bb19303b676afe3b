"""Policies of a node: each has an engine, a tokenizer and a gate."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from astraflow.config.recipe import EngineSettings, Recipe
from astraflow.core.clock import Clock, SystemClock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.members import ModelIdentity
from astraflow.core.tasks import RolloutTask, SamplingParams, TaskPurpose, VersionRange
from astraflow.engines.protocol import Engine
from astraflow.workflows.agents.template import ChatTemplate, load_template, read_identity
from astraflow.workflows.ports import PolicyPort, Tokenizer

if TYPE_CHECKING:
    from astraflow.engines.tokenizer import FastTokenizer

KEPT_S = 60.0

"""How long a pin outlives its last task; it costs the memory of one version."""


# How often is looked whether an engine that was without weights has them again.
_LOOK_S = 1.0

# What a task that waits may sample with, and what it is told once it may start.
_Waiter = tuple[VersionRange, "asyncio.Future[int | None]"]


class VersionGate:
    """Lets tasks of one policy pass, and holds the versions that they pin.

    A task with a lower bound only waits until the live version reaches it. A task with an
    upper bound (an evaluation) gets its version pinned while it runs. One pin outlives its
    tasks, so that the next task of the same evaluation finds the version although training
    moved on; another version's evaluation, a minute without use, or `release` ends it. Not so
    with an engine of one version, where a pin holds training back.
    """

    def __init__(self, policy_id: PolicyId, engine: Engine, *, clock: Clock | None = None) -> None:
        self._policy_id = policy_id
        self._engine = engine
        self._clock = clock or SystemClock()
        self._waiters: list[_Waiter] = []
        self._kept: int | None = None
        self._used_at = 0.0
        self._pinned_count = 0
        self._keeping = asyncio.Lock()
        self._one_at_a_time = asyncio.Lock()

    @property
    def waiting_count(self) -> int:
        """Tasks that wait for a version."""
        return len(self._waiters)

    def next_target(self, newest: int) -> int:
        """Return the version to update to: the newest, or an older one that a task must have."""
        live = -1 if self._engine.version is None else self._engine.version
        bounds = [versions.max for versions, _ in self._waiters]
        return min((b for b in bounds if b is not None and live < b <= newest), default=newest)

    async def enter(self, versions: VersionRange) -> int | None:
        """Wait until a task may start.

        Returns:
            The version to generate with, pinned until `leave`; None: the live one.

        Raises:
            AstraflowError: VERSION_NOT_SERVED when it is too late for it.
        """
        live = self._engine.version
        if live is not None and _is_reached(versions, live):
            admitting = asyncio.ensure_future(self._admit(versions))
            try:
                return await asyncio.shield(admitting)
            except asyncio.CancelledError:
                # A pin that is under way is had, so that it can be let go.
                with suppress(AstraflowError):
                    await self.leave(await admitting)
                raise
        passed: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        waiter = (versions, passed)
        self._waiters.append(waiter)
        try:
            return await passed
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif not passed.cancelled() and passed.exception() is None:
                # It passed in the same turn of the loop in which it was withdrawn.
                await self.leave(passed.result())
            raise

    async def leave(self, pinned: int | None) -> None:
        """End what `enter` began."""
        if pinned is not None:
            self._pinned_count -= 1
            self._used_at = self._clock.monotonic()
            await self._engine.unpin(pinned)

    @asynccontextmanager
    async def swapping(self) -> AsyncGenerator[None]:
        """Swap in a block, after which those pass for whom the live version is enough.

        Pins are taken before the next block begins: its swap cannot overtake them.
        """
        async with self._one_at_a_time:
            yield
            await self._admit_waiting()

    async def follow(self) -> None:
        """Let those pass who came while the engine was without its weights, until cancelled.

        A server may be lost, and be given its weights again, of which nobody is told.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._waiters:
                async with self.swapping():
                    pass

    async def _admit_waiting(self) -> None:
        live = self._engine.version
        if live is None:
            return
        if not self._pinned_count and self._clock.monotonic() - self._used_at > KEPT_S:
            await self.release()
        ready = [waiter for waiter in self._waiters if _is_reached(waiter[0], live)]
        for waiter in ready:
            # It may have been withdrawn while those before it were let pass.
            if waiter not in self._waiters:
                continue
            self._waiters.remove(waiter)
            versions, passed = waiter
            try:
                pinned = await self._admit(versions)
            except AstraflowError as error:
                if not passed.done():
                    passed.set_exception(error)
                continue
            if passed.done():
                await self.leave(pinned)
            else:
                passed.set_result(pinned)

    async def release(self) -> None:
        """Let go of the pin that outlived its tasks."""
        async with self._keeping:
            await self._release()

    async def _release(self) -> None:
        if self._kept is not None:
            kept, self._kept = self._kept, None
            await self._engine.unpin(kept)

    async def _admit(self, versions: VersionRange) -> int | None:
        if versions.max is None:
            return None
        live = self._engine.version
        candidates = {*self._engine.pinned_versions, *(() if live is None else (live,))}
        version = max((each for each in candidates if each in versions), default=None)
        if version is None:
            raise AstraflowError(
                Reason.VERSION_NOT_SERVED,
                f"policy {self._policy_id} serves version {live} here, not one of"
                f" {versions.min} .. {versions.max}; another node may have it",
                retryable=True,
            )
        await self._engine.pin(version)
        self._pinned_count += 1
        self._used_at = self._clock.monotonic()
        async with self._keeping:
            if self._engine.keeps_versions and self._kept != version:
                await self._engine.pin(version)
                await self._release()
                self._kept = version
        return version


def _is_reached(versions: VersionRange, live: int) -> bool:
    """Whether the live version is not below the range; above it, there may be a pin."""
    return versions.min is None or live >= versions.min


def sample_seed(task: RolloutTask, sample_index: int, *, run_seed: int | None) -> int:
    """Return the seed of one sample.

    It depends on the run's seed, the prompt, the pass over the data set, the sample and the
    purpose; not on the attempt, the node or the policy.

    Returns:
        0 .. 2**63 - 1.
    """
    prompt = task.prompt
    parts = (run_seed or 0, prompt.prompt_id, prompt.epoch, sample_index, task.purpose)
    digest = blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seeded_sampling(
    task: RolloutTask, sample_index: int, policy_id: PolicyId, end_ids: tuple[int, ...] = ()
) -> SamplingParams:
    """Return the sampling of one sample: the task's, with its own seed, and more that ends it."""
    sampling = task.sampling.get(policy_id, SamplingParams())
    return replace(
        sampling,
        seed=sample_seed(task, sample_index, run_seed=sampling.seed),
        stop_token_ids=(*sampling.stop_token_ids, *end_ids),
    )


_ANY = VersionRange()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedModel:
    """What a node has for one policy.

    Attributes:
        engine: Samples.
        tokenizer: Of its model.
        template: Of its chats.
        turn_end_ids: End an answer beside the engine's own end tokens.
        identity: What the model is known by.
        meter: Is entered for each request to the engine.
        end_id: Token that ends an answer; None: not known.
    """

    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate = field(default_factory=ChatTemplate)
    turn_end_ids: tuple[int, ...] = ()
    identity: ModelIdentity = field(default_factory=ModelIdentity)
    meter: AbstractContextManager[None] = field(default_factory=nullcontext)
    end_id: int | None = None

    def port(
        self, policy_id: PolicyId, task: RolloutTask, sample_index: int, version: int | None = None
    ) -> PolicyPort:
        """Return what one episode samples with."""
        return PolicyPort(
            policy_id=policy_id,
            engine=self.engine,
            tokenizer=self.tokenizer,
            sampling=seeded_sampling(task, sample_index, policy_id, self.turn_end_ids),
            version=version,
            template=self.template,
            is_trained=task.purpose is TaskPurpose.TRAIN,
            meter=self.meter,
            end_id=self.end_id,
        )


class ServedPolicies:
    """Gives episodes their ports, at versions that their task may sample with."""

    def __init__(self, models: Mapping[PolicyId, ServedModel]) -> None:
        self.models = models
        self.gates = {
            policy_id: VersionGate(policy_id, model.engine) for policy_id, model in models.items()
        }

    async def admit(
        self, task: RolloutTask, policy_ids: Sequence[PolicyId]
    ) -> Mapping[PolicyId, int | None]:
        """Wait until every policy of a task can be sampled from.

        Returns:
            The pinned version of each policy, to be given to `dismiss`; None: the live one.

        Raises:
            AstraflowError: VERSION_NOT_SERVED.
        """
        pinned: dict[PolicyId, int | None] = {}
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.dismiss, pinned)
            for policy_id in policy_ids:
                versions = task.versions.get(policy_id, _ANY)
                pinned[policy_id] = await self.gates[policy_id].enter(versions)
            undo.pop_all()
        return pinned

    async def dismiss(self, pinned: Mapping[PolicyId, int | None]) -> None:
        """Let the versions of a task go."""
        for policy_id, version in pinned.items():
            await self.gates[policy_id].leave(version)

    def ports(
        self, task: RolloutTask, sample_index: int, pinned: Mapping[PolicyId, int | None]
    ) -> Mapping[PolicyId, PolicyPort]:
        """Return what one episode samples with, in the order of `pinned`."""
        return {
            policy_id: self.models[policy_id].port(policy_id, task, sample_index, version)
            for policy_id, version in pinned.items()
        }


log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


def policies_by_engine(
    recipe: Recipe, paths: Mapping[PolicyId, Path]
) -> Sequence[Sequence[PolicyId]]:
    """Return which policies share an engine: those with adapters beside the same model."""
    groups: dict[tuple[Path, str], list[PolicyId]] = {}
    for policy, path in paths.items():
        is_adapted = recipe.policies[policy].model.lora is not None
        groups.setdefault((path.resolve(), "" if is_adapted else policy), []).append(policy)
    return list(groups.values())


def load_models(
    recipe: Recipe, policies: Sequence[str], directory: Path, settings: EngineSettings
) -> Mapping[PolicyId, ServedModel]:
    """Build one engine and what goes with it for the policies that share it.

    Raises:
        AstraflowError: INVALID_FIELD when the model or the settings do not fit.
    """
    from astraflow.engines.building import (  # noqa: PLC0415 - loads torch or httpx
        build_adapter_engines,
        build_engine,
    )
    from astraflow.engines.tokenizer import load_tokenizer  # noqa: PLC0415

    tokenizer = load_tokenizer(directory)
    templates = {policy: chat_template(recipe, policy, directory) for policy in policies}
    identity = read_identity(directory)
    adapted = {
        PolicyId(policy): lora
        for policy in policies
        if (lora := recipe.policies[policy].model.lora) is not None
    }
    engines: Mapping[PolicyId, Engine]
    if adapted:
        engines = build_adapter_engines(directory, settings, adapted)
    else:
        first = PolicyId(policies[0])
        engines = {first: build_engine(directory, settings, first)}
    return {
        policy_id: ServedModel(
            engine=engine,
            tokenizer=tokenizer,
            template=templates[policy_id],
            turn_end_ids=turn_end_ids(templates[policy_id], tokenizer),
            identity=identity,
            end_id=answer_end_id(templates[policy_id], tokenizer),
        )
        for policy_id, engine in engines.items()
    }


def chat_template(recipe: Recipe, policy: str, directory: Path) -> ChatTemplate:
    """Read the template of a policy's chats, and log what it does to chats of several turns.

    Raises:
        AstraflowError: INVALID_FIELD when it cannot be read, or does not show what a user says.
    """
    model = recipe.policies[policy].model
    template = load_template(
        directory, chat_template=model.chat_template, variables=model.chat_template_kwargs
    )
    for warning in template.check.warnings:
        log.warning(warning, policy_id=policy)
    return template


def turn_end_ids(template: ChatTemplate, tokenizer: "FastTokenizer") -> tuple[int, ...]:
    """Return the token that ends an answer of a chat, where the model's end tokens lack it."""
    end = template.turn_end_id(tokenizer)
    return () if end is None or end in tokenizer.special_ids.eos else (end,)


def answer_end_id(template: ChatTemplate, tokenizer: "FastTokenizer") -> int | None:
    """Return the token that ends an answer: that of a chat, else an end token of the model."""
    end = template.turn_end_id(tokenizer)
    return min(tokenizer.special_ids.eos, default=None) if end is None else end
