"""The engine's thread: all work of torch, between messages from the event loop."""

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import KvPolicy
from astraflow.core.tensors import SwapReport
from astraflow.engines.checks import apply_failed
from astraflow.engines.embedded.decoder import Decoder, DecoderSettings, Shown
from astraflow.engines.embedded.lineup import Lineup
from astraflow.engines.embedded.messages import (
    Commit,
    Halt,
    Message,
    Pin,
    Submit,
    Unpin,
    Withdraw,
)
from astraflow.engines.embedded.model import twin_of
from astraflow.engines.embedded.requests import Ended, Request
from astraflow.engines.embedded.shelf import Shelf
from astraflow.engines.embedded.staging import Staged
from astraflow.engines.embedded.weights import Weights
from astraflow.engines.protocol import EngineLoad

# An idle worker begins when nothing has come for so long, or for this share of its last turn: what
# comes a moment later costs a pass of its own, or waits for some.
_COMPANY_S, _COMPANY_SHARE = 0.001, 0.1
# Who watches a generation is told at most so often: the event loop has more to do than that.
_SHOW_S = 0.025

_Reply = tuple[asyncio.Future[Any], Any]
# A policy and one of its versions.
_Pinned = tuple[int, int]
_IDLE = EngineLoad(
    running_count=0, queued_count=0, sampled_token_count=0, kv_fraction=0.0, busy_s=0.0
)


class Worker:
    """Decodes while there are rows, sleeps while there are none.

    What the event loop may read at any time: `shelves` and `loads`.

    Attributes:
        shelves: The versions of each policy.
        loads: Of each policy, after the last step; replaced whole.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        settings: DecoderSettings,
        *,
        thread_count: int,
        kv: KvPolicy,
    ) -> None:
        policy_count = len(settings.adapters) or 1
        self.shelves = tuple(Shelf() for _ in range(policy_count))
        self.loads = (_IDLE,) * policy_count
        self._settings = settings
        self._thread_count = thread_count
        self._kv = kv
        self._live = Lineup(Decoder(module, settings))
        self._pinned: dict[_Pinned, Lineup] = {}
        self._past_sampled_counts = np.zeros(policy_count, np.int64)
        self._handed_counts: Counter[int] = Counter()
        self._seen_counts: Counter[int] = Counter()
        self._busy_s = 0.0
        self._turn_s = 0.0
        self._shown_at = 0.0
        self._replies: list[_Reply] = []
        self._failure: AstraflowError | None = None
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> AstraflowError | None:
        """Why it answers no more; None while it does."""
        return self._failure

    def unseen_count(self, adapter: int) -> int:
        """Return the requests of a policy that it was handed and has not seen."""
        return self._handed_counts[adapter] - self._seen_counts[adapter]

    def put(self, message: Message) -> None:
        """Hand a message over."""
        if isinstance(message, Submit):
            self._handed_counts.update(each.adapter for each in message.requests)
        self._inbox.put(message)

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._thread_count)
        try:
            with torch.inference_mode():
                while self._failure is None:
                    self._turn()
        except Exception as error:  # noqa: BLE001  nobody may wait for a thread that is gone
            self._end(AstraflowError(Reason.ENGINE_FAILED, f"the engine broke: {error!r}"))
            self._report()

    def _turn(self) -> None:
        """Follow what was asked, decode one step, answer."""
        self._read_inbox()
        start = time.perf_counter()
        for pinned, lineup in [(None, self._live), *self._pinned.items()]:
            if not lineup.is_idle:
                self._collect(lineup.advance())
                self._turn_s = time.perf_counter() - start
            if pinned is not None:
                self._let_go(pinned)
        self._busy_s += time.perf_counter() - start
        self._report()

    def _read_inbox(self) -> None:
        """Follow all messages; wait for one when there is nothing to decode."""
        if self._live.is_idle and all(lineup.is_idle for lineup in self._pinned.values()):
            self._follow(self._inbox.get())
            self._await_company()
        while not self._inbox.empty():
            self._follow(self._inbox.get())

    def _await_company(self) -> None:
        """Begin what comes in a row together: a pass over few rows costs as much as one over many.

        Not by a queue's `get` with a timeout, which can block for good (CPython 3.11).
        """
        is_news = bool(self._live.waiting_count)
        while is_news and self._live.waiting_count < self._settings.max_batch:
            time.sleep(max(_COMPANY_S, _COMPANY_SHARE * self._turn_s))
            is_news = not self._inbox.empty()
            while not self._inbox.empty():
                self._follow(self._inbox.get())

    def _follow(self, message: Message) -> None:
        match message:
            case Submit(requests=requests):
                self._seen_counts.update(each.adapter for each in requests)
                for request in requests:
                    self._submit(request)
            case Withdraw(request=request):
                for lineup in (self._live, *self._pinned.values()):
                    lineup.withdraw(request)
            case Commit(staged=staged, reply=reply):
                self._replies.append((reply, self._commit(staged)))
            case Pin(version=version, adapter=adapter, reply=reply):
                self._replies.append((reply, self._pin((adapter, version))))
            case Unpin(version=version, adapter=adapter, reply=reply):
                self.shelves[adapter].unpin(version)
                self._let_go((adapter, version))
                self._replies.append((reply, None))
            case Halt(error=error):
                self._end(error)

    def _end(self, error: AstraflowError) -> None:
        """Answer everything that waits with an error, for good."""
        self._failure = error
        for lineup in (self._live, *self._pinned.values()):
            self._collect(lineup.end(error))
        while not self._inbox.empty():
            match self._inbox.get():
                case Submit(requests=requests):
                    self._replies.extend((request.reply, error) for request in requests)
                case Commit(reply=reply) | Pin(reply=reply) | Unpin(reply=reply):
                    self._replies.append((reply, error))
                case Withdraw() | Halt():
                    pass

    def _submit(self, request: Request) -> None:
        if request.version is None:
            self._live.add(request)
            return
        pinned = (request.adapter, request.version)
        weights = self.shelves[request.adapter].serving(request.version)
        if weights is None:
            self._replies.append((request.reply, self._not_served(pinned)))
            return
        if pinned not in self._pinned:
            lineup = Lineup(Decoder(twin_of(self._live.decoder.module), self._settings))
            lineup.decoder.install(weights)
            self._pinned[pinned] = lineup
            self.shelves[request.adapter].keep(weights)
        self._pinned[pinned].add(request)

    def _commit(self, staged: Staged) -> SwapReport | AstraflowError | None:
        """Change weights between two steps, or leave them as they are, bit for bit."""
        start = time.perf_counter()
        shelf = self.shelves[staged.weights.adapter]
        if staged.would_change(shelf.kept):
            return None
        try:
            staged.apply()
            self._install(staged.weights)
        except Exception as error:  # noqa: BLE001  whatever torch raises, the old version serves on
            staged.revert()
            if shelf.weights is not None:
                self._install(shelf.weights)
            return apply_failed(f"version {staged.weights.version} cannot be applied: {error}")
        shelf.weights = staged.weights
        return SwapReport(
            version=staged.weights.version,
            pause_s=time.perf_counter() - start,
            inflight_count=int(self._live.decoder.running_counts[staged.weights.adapter]),
        )

    def _install(self, weights: Weights) -> None:
        self._live.decoder.install(weights)
        if self._kv is KvPolicy.RECOMPUTE:
            self._live.decoder.recompute(weights.adapter)

    def _pin(self, pinned: _Pinned) -> AstraflowError | None:
        adapter, version = pinned
        weights = self.shelves[adapter].serving(version)
        if weights is None:
            return self._not_served(pinned)
        self.shelves[adapter].pin(weights)
        return None

    def _let_go(self, pinned: _Pinned) -> None:
        """Drop a version that is not pinned and has nothing to decode."""
        adapter, version = pinned
        lineup, shelf = self._pinned.get(pinned), self.shelves[adapter]
        if version in shelf.pins or (lineup is not None and not lineup.is_idle):
            return
        if lineup is not None:
            self._past_sampled_counts += lineup.decoder.sampled_counts
            del self._pinned[pinned]
        shelf.drop(version)

    def _not_served(self, pinned: _Pinned) -> AstraflowError:
        adapter, version = pinned
        shelf = self.shelves[adapter]
        live = None if shelf.weights is None else shelf.weights.version
        return AstraflowError(
            Reason.VERSION_NOT_SERVED,
            f"version {version} is not served: {live} is live and {sorted(shelf.pins)} are pinned",
        )

    def _collect(self, ended: list[Ended]) -> None:
        self._replies.extend((one.request.reply, one.result) for one in ended)

    def _report(self) -> None:
        """Publish the load, then wake the event loop once for all that was answered."""
        lineups = [self._live, *self._pinned.values()]
        decoders = [lineup.decoder for lineup in lineups]
        self.loads = self._loads(lineups, decoders)
        if self._replies:
            replies, self._replies = self._replies, []
            # The loop may have ended without closing the engine; then nobody waits.
            with contextlib.suppress(RuntimeError):
                replies[0][0].get_loop().call_soon_threadsafe(_deliver, replies)
        self._show(decoders)

    def _loads(self, lineups: list[Lineup], decoders: list[Decoder]) -> tuple[EngineLoad, ...]:
        """Return the load of each policy; cache and time are those of all together."""
        places = self._settings.max_batch * self._settings.max_context * len(decoders)
        kv_fraction = sum(decoder.cached_token_count for decoder in decoders) / places
        running = sum(decoder.running_counts for decoder in decoders)
        sampled = self._past_sampled_counts + sum(each.sampled_counts for each in decoders)
        waiting = sum(lineup.waiting_counts(len(self.shelves)) for lineup in lineups)
        columns = np.stack([running, waiting, sampled]).T.tolist()
        return tuple(
            EngineLoad(
                running_count=running_count,
                queued_count=queued_count,
                sampled_token_count=sampled_count,
                kv_fraction=kv_fraction,
                busy_s=self._busy_s,
            )
            for running_count, queued_count, sampled_count in columns
        )

    def _show(self, decoders: Sequence[Decoder]) -> None:
        """Tell those who watch a generation of its new tokens, all at once."""
        now = time.perf_counter()
        if now - self._shown_at < _SHOW_S:
            return
        self._shown_at = now
        shown = [one for each in decoders for one in each.unshown()]
        if shown:
            with contextlib.suppress(RuntimeError):
                shown[0][0].reply.get_loop().call_soon_threadsafe(_show, shown)


def _show(shown: list[Shown]) -> None:
    for request, tokens in shown:
        if request.watch is not None and not request.reply.done():
            request.watch(tokens)


def _deliver(replies: list[_Reply]) -> None:
    for future, result in replies:
        if future.done():
            continue
        if isinstance(result, AstraflowError):
            future.set_exception(result)
        else:
            future.set_result(result)
