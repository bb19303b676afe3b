"""What clients ask for, done: models that are trained, checkpoints, sessions that sample."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog
from starlette.responses import Response

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.http import json_answer
from astraflow.tinker.checkpoints import (
    SAMPLER,
    SNAPSHOT,
    STATE,
    CheckpointPath,
    TinkerCheckpoints,
    require_id,
)
from astraflow.tinker.learner import Learner, LoadedBase
from astraflow.tinker.promises import (
    InOrder,
    Promise,
    Promises,
    loop_time,
    protobuf_answer,
)
from astraflow.tinker.requests import (
    CreateModel,
    CreateSamplingSession,
    LoadWeights,
    LoraConfig,
    OptimStep,
    SampleRequest,
    SaveWeights,
    SaveWeightsForSampler,
)
from astraflow.tinker.samplers import Samplers
from astraflow.tinker.wire import parse_request, pb, sample_output, train_output, unserved

# Models that are trained at once.
_MODEL_COUNT: Final = 16
# A session whose client says nothing for so long gives its models up to others.
_SILENCE_S: Final = 300.0
# Sessions that are remembered, the silent ones too.
_SESSION_COUNT: Final = 4096
# Completions that wait or are sampled, and bytes of all bodies that wait.
_SEQUENCE_COUNT: Final = 1 << 17
_QUEUED_NBYTES: Final = 2 << 30

T = TypeVar("T")

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class ClientModel:
    """A model that is trained."""

    model_id: str
    session_id: str
    turns: InOrder = field(default_factory=InOrder)
    learner: Learner | None = None
    made: asyncio.Event = field(default_factory=asyncio.Event)

    async def ready(self) -> Learner:
        """Wait until it is made."""
        await self.made.wait()
        if self.learner is None:
            raise _no_model(self.model_id)
        return self.learner


class Service:
    """Everything behind the routes. It belongs to one event loop.

    Requests raise INVALID_FIELD, POLICY_UNKNOWN for a model that is not here, REQUEST_CONFLICT for
    another body under the same number, OVERLOADED when too much waits, CHECKPOINT_UNKNOWN.
    """

    def __init__(
        self,
        base: LoadedBase,
        samplers: Samplers,
        checkpoints: TinkerCheckpoints,
        promises: Promises,
        *,
        base_model: str,
        max_rank: int,
    ) -> None:
        self.base_model = base_model
        self.promises = promises
        self._base = base
        self._samplers = samplers
        self._checkpoints = checkpoints
        self._max_rank = max_rank
        self._models: dict[str, ClientModel] = {}
        self._heard: dict[str, float] = {}
        self._sequence_count = 0
        self._queued_nbytes = 0
        # One step at a time, of whichever model: they share memory and cores.
        self._trainer = ThreadPoolExecutor(1, "tinker-trainer")

    @property
    def max_context(self) -> int:
        """Tokens of one sequence."""
        return self._samplers.max_context

    def close(self) -> None:
        """Take no more work."""
        self.promises.close()
        self._trainer.shutdown(wait=False, cancel_futures=True)

    def hear(self, session_id: str) -> None:
        """Note that the client of a session is there."""
        self._heard[require_id(session_id)] = now = loop_time()
        if len(self._heard) > _SESSION_COUNT:
            self._heard = {key: at for key, at in self._heard.items() if at > now - _SILENCE_S}

    def finish(self, session_id: str) -> None:
        """Let go of the models of a session."""
        self._heard.pop(session_id, None)
        for model in [each for each in self._models.values() if each.session_id == session_id]:
            del self._models[model.model_id]

    def unload(self, model_id: str) -> Promise:
        """Let go of a model; one that is not there is gone already."""
        self._models.pop(model_id, None)

        async def work() -> Response:
            return json_answer({"model_id": model_id})

        return self.promises.make(object(), b"", work())

    async def info(self, model_id: str) -> dict[str, Any]:
        """Return what is told of a model."""
        learner = await self._model(model_id).ready()
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_name": self.base_model,
            "model_data": {"model_name": self.base_model, "tokenizer_id": self.base_model},
            "is_lora": learner.lora is not None,
            "lora_rank": 0 if learner.lora is None else learner.lora.rank,
        }

    def create_model(self, fields: CreateModel, digest: bytes) -> Promise:
        def make() -> Learner:
            self._require_base(fields.base_model)
            return self._new_learner(fields.lora_config or LoraConfig())

        return self._begin(fields.session_id, fields.model_seq_id, digest, make)

    def load_weights(self, fields: LoadWeights, digest: bytes) -> Promise:
        """Go on from a checkpoint, with a new model or with one that is there."""

        async def load(model: ClientModel) -> Response:
            learner = await model.ready()

            def read() -> None:
                directory = self._checkpoints.find(CheckpointPath.parse(fields.path))
                learner.load(directory, with_optimizer=fields.optimizer)

            await self._train(read)
            return json_answer({"path": fields.path, "model_id": model.model_id})

        if fields.model_id is not None and fields.seq_id is not None:
            return self._ordered(fields.model_id, fields.seq_id, digest, load)
        if fields.session_id is None or fields.model_seq_id is None:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                "give session_id and model_seq_id for a new model, or model_id and seq_id",
            )

        def make() -> Learner:
            if fields.base_model is not None:
                self._require_base(fields.base_model)
            directory = self._checkpoints.find(CheckpointPath.parse(fields.path))
            return self._base.restored(directory, with_optimizer=fields.optimizer)

        return self._begin(fields.session_id, fields.model_seq_id, digest, make, path=fields.path)

    def forward_backward(
        self, message: pb.ForwardBackwardRequest, digest: bytes, *, nbytes: int
    ) -> Promise:
        """Add the gradient of a loss; the body of the message had `nbytes`."""

        async def work(model: ClientModel) -> Response:
            learner = await model.ready()

            def learn() -> bytes:
                logprobs, loss = learner.forward_backward(parse_request(message))
                return train_output(logprobs, {"loss:sum": loss})

            return protobuf_answer(await self._train(learn))

        found = self.promises.find((message.model_id, message.seq_id), digest)
        if found is not None:
            return found
        self._require_queue(nbytes)
        promise = self._ordered(message.model_id, message.seq_id, digest, work)
        self._queue(promise, nbytes)
        return promise

    def optim_step(self, fields: OptimStep, digest: bytes) -> Promise:
        async def work(model: ClientModel) -> Response:
            learner = await model.ready()
            metrics = await self._train(lambda: learner.optim_step(fields.adam_params))
            return json_answer({"metrics": dict(metrics)})

        return self._ordered(fields.model_id, fields.seq_id, digest, work)

    def save_weights(self, fields: SaveWeights, digest: bytes) -> Promise:
        """Keep weights and optimizer."""

        async def work(model: ClientModel) -> Response:
            learner = await model.ready()
            place = CheckpointPath.of(model.model_id, STATE, fields.path or f"seq-{fields.seq_id}")

            def save() -> None:
                self._checkpoints.save(
                    place,
                    lambda draft: learner.save(draft, with_optimizer=True),
                    overwrite=fields.overwrite,
                    ttl_s=fields.ttl_seconds,
                )

            await self._train(save)
            return json_answer({"path": place.path})

        return self._ordered(fields.model_id, fields.seq_id, digest, work)

    def save_weights_for_sampler(self, fields: SaveWeightsForSampler, digest: bytes) -> Promise:
        """Keep weights by a name, or for a sampling session that begins with them."""

        async def work(model: ClientModel) -> Response:
            if fields.kind != "snapshot":
                raise unserved(f"kind {fields.kind}", "sample from snapshots")
            learner = await model.ready()
            if fields.path is None and fields.sampling_session_seq_id is not None:
                place = CheckpointPath.of(model.model_id, SNAPSHOT, f"{fields.seq_id:09d}")
                sampler_id = f"{model.session_id}:sample:{fields.sampling_session_seq_id}"
                told = {"sampling_session_id": sampler_id}
            else:
                name = fields.path or f"seq-{fields.seq_id}"
                place, sampler_id = CheckpointPath.of(model.model_id, SAMPLER, name), None
                told = {"path": place.path}

            def save() -> None:
                self._checkpoints.save(
                    place,
                    lambda draft: learner.save(draft, with_optimizer=False),
                    ttl_s=fields.ttl_seconds,
                )
                if sampler_id is not None:
                    self._checkpoints.put_sampler(sampler_id, place)

            await self._train(save)
            return json_answer(told)

        return self._ordered(fields.model_id, fields.seq_id, digest, work)

    def refuse(self, model_id: str, seq_id: int, digest: bytes, error: AstraflowError) -> Promise:
        """Let a wrong request have its turn all the same: those after it wait for it."""

        async def work(_: ClientModel) -> Response:
            raise error

        return self._ordered(model_id, seq_id, digest, work)

    async def create_sampling_session(self, fields: CreateSamplingSession) -> str:
        """Begin a session that samples from a checkpoint or from the base model; return its id."""
        place = None
        if fields.model_path is not None:
            place = CheckpointPath.parse(fields.model_path)
            if place.kind != SAMPLER:
                raise AstraflowError(
                    Reason.INVALID_FIELD,
                    f"{fields.model_path}: sessions sample from what save_weights_for_sampler kept",
                )
            await asyncio.to_thread(self._checkpoints.find, place)
        else:
            self._require_base(fields.base_model)
        sampler_id = f"{fields.session_id}:sample:{fields.sampling_session_seq_id}"
        await asyncio.to_thread(self._checkpoints.put_sampler, sampler_id, place)
        return sampler_id

    async def sampler(self, sampler_id: str) -> dict[str, Any]:
        """Return what is told of a sampling session."""
        place = await asyncio.to_thread(self._checkpoints.sampler, sampler_id)
        told = {"sampler_id": sampler_id, "base_model": self.base_model}
        return (
            told if place is None or place.kind != SAMPLER else {**told, "model_path": place.path}
        )

    def sample(self, fields: SampleRequest, digest: bytes, *, nbytes: int) -> Promise:
        """Sample, and score the prompt where that is asked for; the body had `nbytes`."""
        key = (fields.sampling_session_id, fields.seq_id)
        found = self.promises.find(key, digest)
        if found is not None:
            return found
        if self._sequence_count + fields.num_samples > _SEQUENCE_COUNT:
            raise AstraflowError(
                Reason.OVERLOADED, f"{self._sequence_count} completions wait here already"
            )
        self._require_queue(nbytes)
        promise = self.promises.make(key, digest, self._sample(fields))
        self._queue(promise, nbytes, sequence_count=fields.num_samples)
        return promise

    async def _sample(self, fields: SampleRequest) -> Response:
        def snapshot_of() -> Path | None:
            place = self._checkpoints.sampler(fields.sampling_session_id)
            return None if place is None else self._checkpoints.find(place)

        fields.require_served()
        prompt = fields.prompt.tokens
        snapshot = await asyncio.to_thread(snapshot_of)
        sampling = fields.sampling_params.params(likeliest_count=fields.topk_sample_logprobs)
        generations = await self._samplers.sample(
            snapshot, prompt, sampling, sample_count=fields.num_samples
        )
        scored, likeliest = None, ()
        if fields.prompt_logprobs or fields.topk_prompt_logprobs:
            last = fields.prompt_logprobs_last_n or len(prompt)
            scored, likeliest = await self._train(
                lambda: self._base.prompt_logprobs(
                    snapshot, prompt, last=last, likeliest_count=fields.topk_prompt_logprobs
                )
            )
        output = sample_output(
            generations,
            likeliest_count=fields.topk_sample_logprobs,
            prompt_logprobs=scored if fields.prompt_logprobs else None,
            prompt_likeliest=likeliest,
        )
        return protobuf_answer(output)

    def _require_queue(self, nbytes: int) -> None:
        if self._queued_nbytes + nbytes > _QUEUED_NBYTES:
            raise AstraflowError(Reason.OVERLOADED, "the bodies that wait here take too much")

    def _queue(self, promise: Promise, nbytes: int, *, sequence_count: int = 0) -> None:
        """Count what a request takes until it is answered."""
        self._queued_nbytes += nbytes
        self._sequence_count += sequence_count

        def done(_: object) -> None:
            self._queued_nbytes -= nbytes
            self._sequence_count -= sequence_count

        promise.task.add_done_callback(done)

    def _require_base(self, base_model: str | None) -> None:
        if base_model != self.base_model:
            raise AstraflowError(
                Reason.MODEL_MISMATCH,
                f"base_model {base_model!r}: this server has {self.base_model!r}",
            )

    def _new_learner(self, config: LoraConfig) -> Learner:
        if not config.rank:
            if not self._samplers.serves_whole_models:
                raise unserved("rank 0 with a server as the engine", "train adapters")
            return self._base.learner(None)
        if config.rank > self._max_rank:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"lora_config.rank {config.rank} is more than {self._max_rank}: start the server "
                "with a greater --max-rank",
            )
        lora = self._base.lora(rank=config.rank, attention=config.train_attn, mlp=config.train_mlp)
        return self._base.learner(lora, seed=(config.seed or 0) % (1 << 32))

    def _begin(
        self,
        session_id: str,
        number: int,
        digest: bytes,
        make: Callable[[], Learner],
        *,
        path: str | None = None,
    ) -> Promise:
        """Make a model of a session."""
        model_id = f"{session_id}:train:{number}"
        found = self.promises.find(model_id, digest)
        if found is not None:
            return found
        if model_id in self._models:
            raise AstraflowError(Reason.REQUEST_CONFLICT, f"model {model_id} is there already")
        self._evict()
        self.hear(session_id)
        model = self._models[model_id] = ClientModel(model_id=model_id, session_id=session_id)

        async def work() -> Response:
            try:
                model.learner = await self._train(make)
            except BaseException:
                self._models.pop(model_id, None)
                raise
            finally:
                model.made.set()
            log.info("model made", model_id=model_id, rank=getattr(model.learner.lora, "rank", 0))
            told = {"model_id": model_id, "type": "create_model"}
            return json_answer(
                told if path is None else {**told, "type": "load_weights", "path": path}
            )

        return self.promises.make(model_id, digest, work())

    def _evict(self) -> None:
        """Let go of models whose clients are gone, if there are too many."""
        if len(self._models) < _MODEL_COUNT:
            return
        silent = loop_time() - _SILENCE_S
        for model in list(self._models.values()):
            if self._heard.get(model.session_id, 0.0) < silent:
                log.info("model dropped: its client is gone", model_id=model.model_id)
                del self._models[model.model_id]
                return
        raise AstraflowError(
            Reason.OVERLOADED, f"{_MODEL_COUNT} models are trained here; finish a session first"
        )

    def _ordered(
        self,
        model_id: str,
        seq_id: int,
        digest: bytes,
        work: Callable[[ClientModel], Awaitable[Response]],
    ) -> Promise:
        """Do a request when it is its turn among those of its model."""
        key = (model_id, seq_id)
        found = self.promises.find(key, digest)
        if found is not None:
            return found
        model = self._model(model_id)
        if model.turns.is_over(seq_id):
            raise AstraflowError(
                Reason.REQUEST_CONFLICT, f"request {seq_id} of {model_id} was done long ago"
            )

        async def in_turn() -> Response:
            async with model.turns.turn(seq_id):
                return await work(model)

        return self.promises.make(key, digest, in_turn())

    def _model(self, model_id: str) -> ClientModel:
        model = self._models.get(model_id)
        if model is None:
            raise _no_model(model_id)
        return model

    def _train(self, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._trainer, work)


def _no_model(model_id: str) -> AstraflowError:
    return AstraflowError(
        Reason.POLICY_UNKNOWN,
        f"model {model_id[:200]!r} is not here: its session ended, or the server was started anew; "
        "create one from the last checkpoint",
    )
