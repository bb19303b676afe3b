"""The base: one module and its threads, for one policy or for several with adapters."""

import asyncio
import contextlib
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import KvPolicy
from astraflow.core.tensors import SwapReport
from astraflow.engines.embedded.decoder import DecoderSettings
from astraflow.engines.embedded.grammars import Grammars
from astraflow.engines.embedded.messages import Commit, Halt, Message, Submit, Withdraw
from astraflow.engines.embedded.model import build_module, load_config, read_architecture
from astraflow.engines.embedded.requests import Request
from astraflow.engines.embedded.set_up import decoder_settings
from astraflow.engines.embedded.staging import Staged
from astraflow.engines.embedded.weights import Weights
from astraflow.engines.embedded.worker import Worker
from astraflow.engines.tokenizer import Tokenizer, load_tokenizer, read_special_ids

Stage = Callable[[Weights | None, Collection[Weights]], Staged]
"""Makes a version, beside the live one and those that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A module and how it decodes.

    Attributes:
        model_dir: Of its architecture and tokenizer.
        module: Its weights mean nothing yet.
        decoding: Of its decoders.
        tokenizer: None: no text is read.
        grammars: Of its tokens; None: no text is read.
    """

    model_dir: Path
    module: torch.nn.Module
    decoding: DecoderSettings
    tokenizer: Tokenizer | None
    grammars: Grammars | None

    @classmethod
    def of(cls, model_dir: Path, settings: EngineSettings, *, draws_all: bool = False) -> "Plan":
        """Read a Hugging Face directory.

        Args:
            model_dir: With config.json.
            settings: Of the recipe.
            draws_all: Whether padding and beginning of text are drawn, too.

        Raises:
            AstraflowError: INVALID_FIELD when the directory or the settings do not fit.
        """
        config = load_config(model_dir)
        has_text = (model_dir / "tokenizer.json").is_file()
        tokenizer = load_tokenizer(model_dir) if has_text else None
        special = tokenizer.special_ids if tokenizer else read_special_ids(model_dir)
        if draws_all:
            special = replace(special, never_sampled=frozenset())
        decoding = decoder_settings(
            settings, read_architecture(config), special=special, tokenizer=tokenizer
        )
        vocab_size = decoding.architecture.vocab_size
        return cls(
            model_dir=model_dir,
            module=build_module(config, dtype=decoding.dtype, device=decoding.device),
            decoding=decoding,
            tokenizer=tokenizer,
            grammars=tokenizer and Grammars(tokenizer, vocab_size=vocab_size),
        )


class Base:
    """Hands requests and versions to the thread of a module, and takes none once it is closed.

    Attributes:
        plan: What runs.
        kv: What becomes of a cache when another version takes over.
        worker: The thread.
    """

    def __init__(self, plan: Plan, *, thread_count: int, kv: KvPolicy) -> None:
        """Start the threads.

        Args:
            plan: What to run.
            thread_count: Of torch, to decode and to stage.
            kv: What becomes of a cache when another version takes over.
        """
        self.plan = plan
        self.kv = kv
        self._is_closed = False
        self._submitted: list[Request] = []
        # Its own thread: torch bounds threads per thread, and decoding needs the other cores.
        self._stager = ThreadPoolExecutor(1, "staging", torch.set_num_threads, (thread_count,))
        self.worker = Worker(plan.module, plan.decoding, thread_count=thread_count, kv=kv)

    def unseen_count(self, adapter: int) -> int:
        """Return the requests of a policy that the worker has not seen yet."""
        submitted = sum(each.adapter == adapter for each in self._submitted)
        return submitted + self.worker.unseen_count(adapter)

    def submit(self, request: Request) -> None:
        """Hand a request over with all others of this turn of the event loop: read together."""
        self.require_running()
        if not self._submitted:
            asyncio.get_running_loop().call_soon(self._put_submitted)
        self._submitted.append(request)

    def withdraw(self, request: Request) -> None:
        """Take a request back."""
        self._put_submitted()
        self.worker.put(Withdraw(request=request))

    def put(self, message: Message) -> None:
        """Hand a message over, after the requests before it."""
        self.require_running()
        self._put_submitted()
        self.worker.put(message)

    async def go_live(self, adapter: int, make: Stage) -> SwapReport:
        """Stage until it can be committed: again if a version was pinned in the meantime."""
        shelf = self.worker.shelves[adapter]
        while True:
            self.require_running()
            staged = await asyncio.get_running_loop().run_in_executor(
                self._stager, make, shelf.weights, shelf.kept
            )
            report = await self._commit(staged)
            if report is not None:
                return report

    async def close(self) -> None:
        """Stop; running generations end with ENGINE_FAILED."""
        self._is_closed = True
        self._put_submitted()
        self.worker.put(Halt(error=_closed()))
        self._stager.shutdown(wait=False)
        await asyncio.to_thread(self.worker.join)

    def require_running(self) -> None:
        """Raise what ended it, if it has ended."""
        failure = _closed() if self._is_closed else self.worker.failure
        if failure is not None:
            raise failure

    async def _commit(self, staged: Staged) -> SwapReport | None:
        """Hand over; the worker has let go of the update's arrays when this ends."""
        reply: asyncio.Future[SwapReport | None] = asyncio.get_running_loop().create_future()
        self.put(Commit(staged=staged, reply=reply))
        try:
            return await asyncio.shield(reply)
        except asyncio.CancelledError:
            with contextlib.suppress(AstraflowError):
                await reply
            raise

    def _put_submitted(self) -> None:
        if self._submitted:
            requests, self._submitted = self._submitted, []
            self.worker.put(Submit(requests=requests))


def _closed() -> AstraflowError:
    return AstraflowError(Reason.ENGINE_FAILED, "the engine was closed")
