"""Dialects: what differs between makes of inference servers."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx
import numpy as np

from astraflow.config.model_dirs import read_config
from astraflow.config.recipe import EngineSettings
from astraflow.core.rollouts import FinishReason, KvPolicy
from astraflow.core.tasks import SamplingParams
from astraflow.engines.devices import computed_dtype
from astraflow.engines.protocol import EngineLoad, Likeliest

# A dead server refuses at once; one that is busy takes its time.
CONNECT_S = 60.0
# Of completions: however long they are, a dead server closes its connections, and one that is
# silent is looked after.
NO_END = httpx.Timeout(None, connect=CONNECT_S)
# How servers say that a completion ended.
ENDS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLimits:
    """What a server has room for beside its model.

    Attributes:
        count: Adapters that one step computes with.
        rank: The widest.
        targets: Layers that any of them adapts, by the last part of their names.
    """

    count: int
    rank: int
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSetup:
    """Where a server is to stand.

    Attributes:
        model_dir: Hugging Face directory.
        port: On loopback.
        folder: In memory; updates are handed over in it, and its `python` is on the server's
            PYTHONPATH: there `astraflow_plugins` is `astraflow.engines.plugins`.
        max_context: Tokens of prompt and completion together.
        adapters: Its room for them; None: it serves the model alone.
    """

    model_dir: Path
    port: int
    folder: Path
    settings: EngineSettings
    max_context: int
    adapters: AdapterLimits | None = None

    @property
    def dtype(self) -> Literal["f32", "bf16"]:
        """What it computes in."""
        fields = read_config(self.model_dir)
        return computed_dtype(self.settings, fields.get("dtype") or fields.get("torch_dtype"))

    @property
    def dtype_name(self) -> str:
        """The same, as torch calls it."""
        return {"f32": "float32", "bf16": "bfloat16"}[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """How a server is started.

    Attributes:
        argv: Interpreter first.
        env: Beside the node's own environment.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequest:
    """One completion that is asked of a server.

    Attributes:
        request_id: Unique; names it in `Dialect.abort`.
        sampling: Checked; `max_new_tokens` is what fits the context, at least 1.
        stop_ids: All that end it: the model's own end tokens, unless ignored, and those asked for.
        never_sampled: Ids that have to be kept out.
        cache_salt: Keys and values of prompts are shared only between requests of one salt. Each
            version has its own, so that none are read that other weights computed.
        is_streamed: Whether pieces are wanted while it goes on; one piece at the end otherwise.
        adapter: Name of the one that it is sampled with; None: the model alone.
        tells_experts: Whether the answer says which experts tokens went through.
    """

    request_id: str
    prompt: Sequence[int]
    sampling: SamplingParams
    stop_ids: tuple[int, ...] = ()
    never_sampled: tuple[int, ...] = ()
    cache_salt: str = ""
    is_streamed: bool = False
    adapter: str | None = None
    tells_experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionPiece:
    """Some tokens of a completion, in their order.

    Attributes:
        tokens: Ids; an end token that was sampled is among them.
        logprobs: Of each, under the distribution that it was sampled from.
        versions: (version, tokens) that cover them, as the server tells it of its model's weights.
        finish_reason: With the last piece; None before.
        likeliest: Beside each token, where they were asked for; empty: they are not told.
        experts: Which ones the tokens from the first of the prompt on went through, integers
            [n, layers, k] or flat; None: it does not tell. A later piece tells of all again.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[tuple[int, int]]
    finish_reason: FinishReason | None = None
    likeliest: Sequence[Likeliest] = ()
    experts: np.ndarray | None = None


class Dialect(Protocol):
    """How one make of server is started, asked and updated.

    Every call raises `httpx.HTTPError` when the server cannot be reached, and `AstraflowError`
    (ENGINE_FAILED, INVALID_FIELD; APPLY_FAILED from `stage` and `change`) for what it answers.
    """

    @property
    def name(self) -> str:
        """As in `raas.engine.kind`."""
        ...

    @property
    def report(self) -> Mapping[str, Any]:
        """What the last update did, in the slowest rank: `nbytes` written, `apply_s` taken."""
        ...

    @property
    def kv_policies(self) -> frozenset[KvPolicy]:
        """What it can do to the cache of running generations when a version takes over."""
        ...

    def launch(self, place: ServerSetup) -> ServerCommand:
        """Return how to start it."""
        ...

    async def is_alive(self, http: httpx.AsyncClient) -> bool:
        """Return whether it generates: one real token, not a health page."""
        ...

    async def served_model(self, http: httpx.AsyncClient) -> tuple[Path, int | None]:
        """Return the directory of its model, as it was told it, and its context in tokens.

        The context is that of prompt and completion together; None: the model's own.

        Raises:
            AstraflowError: INVALID_FIELD for a server that was not started to be updated.
        """
        ...

    async def wake(self, http: httpx.AsyncClient) -> None:
        """Have a server go on that somebody else had before, and may have left paused."""
        ...

    def generate(
        self, http: httpx.AsyncClient, request: ServerRequest
    ) -> AsyncGenerator[CompletionPiece]:
        """Sample one completion, asked for with the time limit `NO_END`.

        Closing the iterator lets go of the connection; `abort` withdraws the request.
        """
        ...

    async def abort(self, http: httpx.AsyncClient, request_id: str) -> None:
        """Withdraw a request; one that is unknown or over is none."""
        ...

    async def stage(self, http: httpx.AsyncClient, file: Path) -> None:
        """Make ready what `change` will do, beside generation; nothing live is written to."""
        ...

    async def change(
        self, http: httpx.AsyncClient, file: Path, *, version: int, kv: KvPolicy
    ) -> None:
        """Write what was staged while nothing decodes, and check what was written.

        Running requests stay, and go on; their next tokens are told to be of `version`. With
        RECOMPUTE their keys and values are forgotten: they are read anew. What prompts left in the
        cache needs no care: salts keep versions apart.
        """
        ...

    async def checksums(self, http: httpx.AsyncClient) -> Mapping[str, str]:
        """Return the server's own checksum of each of its parameters; O(model)."""
        ...

    async def load_adapter(self, http: httpx.AsyncClient, name: str, folder: Path) -> None:
        """Make an adapter known; nothing that runs is touched.

        Args:
            http: Reaches the server.
            name: That no adapter of the server has.
            folder: With the files of peft; it stays until the adapter is unloaded.
        """
        ...

    async def unload_adapter(self, http: httpx.AsyncClient, name: str) -> None:
        """Forget an adapter that nothing runs with."""
        ...

    async def load(self, http: httpx.AsyncClient) -> EngineLoad:
        """Return how busy it is; of what it does not count, 0."""
        ...
