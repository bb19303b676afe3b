"""The engine's thread: requests that wait for rows, and all work of torch."""

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import KvPolicy
from astraflow.core.tensors import SwapReport
from astraflow.engines.checks import apply_failed, engine_closed
from astraflow.engines.embedded.decoder import Decoder, DecoderSettings, Shown
from astraflow.engines.embedded.model import twin_of
from astraflow.engines.embedded.rows import Request
from astraflow.engines.embedded.weights import Staged, VersionSet, Weights
from astraflow.engines.protocol import EngineLoad

# An idle worker begins when nothing has come for so long, or for this share of its last turn: what
# comes a moment later costs a pass of its own, or waits for some.
_COMPANY_S, _COMPANY_SHARE = 0.001, 0.1

# Who watches a generation is told at most so often: the event loop has more to do than that.
_SHOW_S = 0.025

_Reply = tuple[asyncio.Future[Any], Any]

# Who waits for an answer, and what is to be done.
_Asked = tuple[tuple[asyncio.Future[Any], ...], Callable[[], None]]

# A policy and one of its versions.
_PolicyVersion = tuple[int, int]


class DecodeWorker:
    """Decodes while there are rows, sleeps while there are none.

    What the event loop may read at any time: `version_sets`, `loads` and `failure`.

    Attributes:
        version_sets: The versions of each policy.
        loads: Of each policy, after the last step; replaced whole.
        failure: Why it answers no more; None while it does.
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
        self.version_sets = tuple(VersionSet() for _ in range(policy_count))
        self.loads = (EngineLoad(),) * policy_count
        self._settings = settings
        self._thread_count = thread_count
        self._kv = kv
        self._live = Decoder(module, settings)
        self._pinned: dict[_PolicyVersion, Decoder] = {}
        self._past_sampled_counts = np.zeros(policy_count, np.int64)
        self._submitted: list[Request] = []
        self._submitted_counts: Counter[int] = Counter()
        self._seen_counts: Counter[int] = Counter()
        self._busy_s = 0.0
        self._turn_s = 0.0
        self._shown_at = 0.0
        self._replies: list[_Reply] = []
        self.failure: AstraflowError | None = None
        self._is_closed = False
        self._inbox: SimpleQueue[_Asked] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
        self._thread.start()

    def unseen_count(self, adapter: int) -> int:
        """Return the requests of a policy that were submitted and that it has not seen."""
        return self._submitted_counts[adapter] - self._seen_counts[adapter]

    def require_running(self) -> None:
        """Raise what ended it, if it has ended."""
        failure = engine_closed() if self._is_closed else self.failure
        if failure is not None:
            raise failure

    def submit(self, request: Request) -> None:
        """Generate for a request and all others of this turn of the event loop: read together."""
        self.require_running()
        if not self._submitted:
            asyncio.get_running_loop().call_soon(self._hand_over)
        self._submitted.append(request)
        self._submitted_counts[request.adapter] += 1

    def withdraw(self, request: Request) -> None:
        self._put((), partial(self._withdraw, request))

    def commit(self, staged: Staged) -> "asyncio.Future[SwapReport | None]":
        """Make weights live; the answer is None when they have to be staged again."""
        return self._ask(partial(self._commit, staged))

    def pin(self, adapter: int, version: int) -> "asyncio.Future[None]":
        return self._ask(partial(self._pin, (adapter, version)))

    def unpin(self, adapter: int, version: int) -> "asyncio.Future[None]":
        return self._ask(partial(self._unpin, (adapter, version)))

    def close(self) -> None:
        """End the thread, and all requests with an error."""
        self._is_closed = True
        self._put((), partial(self._end, engine_closed()))

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._thread_count)
        try:
            with torch.inference_mode():
                while self.failure is None:
                    self._turn()
        except Exception as error:  # noqa: BLE001  nobody may wait for a thread that is gone
            self._end(AstraflowError(Reason.ENGINE_FAILED, f"the engine broke: {error!r}"))
            self._report()

    def _turn(self) -> None:
        """Follow what was asked, decode one step, answer."""
        self._read_inbox()
        start = time.perf_counter()
        for pinned, decoder in [(None, self._live), *self._pinned.items()]:
            if not decoder.is_idle:
                self._replies += ((each.reply, ended) for each, ended in decoder.advance())
                self._turn_s = time.perf_counter() - start
            if pinned is not None:
                self._let_go(pinned)
        self._busy_s += time.perf_counter() - start
        self._report()

    def _read_inbox(self) -> None:
        """Follow all messages; wait for one when there is nothing to decode."""
        if self._live.is_idle and all(decoder.is_idle for decoder in self._pinned.values()):
            self._follow()
            self._await_batch()
        while not self._inbox.empty():
            self._follow()

    def _await_batch(self) -> None:
        """Begin what comes in a row together: a pass over few rows costs as much as one over many.

        Not by a queue's `get` with a timeout, which can block for good (CPython 3.11).
        """
        is_news = bool(self._live.waiting_count)
        while is_news and self._live.waiting_count < self._settings.max_batch:
            time.sleep(max(_COMPANY_S, _COMPANY_SHARE * self._turn_s))
            is_news = not self._inbox.empty()
            while not self._inbox.empty():
                self._follow()

    def _follow(self) -> None:
        asked = self._inbox.get()
        try:
            asked[1]()
        except Exception:
            # Who waits for it is answered with all others.
            self._inbox.put(asked)
            raise

    def _ask(self, act: Callable[[], object]) -> "asyncio.Future[Any]":
        """Have something done between two steps; what it returns is the answer."""
        self.require_running()
        reply = asyncio.get_running_loop().create_future()
        self._put((reply,), lambda: self._replies.append((reply, act())))
        return reply

    def _put(self, waiting: tuple[asyncio.Future[Any], ...], act: Callable[[], None]) -> None:
        """Say what is to be done next, after all that was submitted."""
        self._hand_over()
        self._send(waiting, act)

    def _hand_over(self) -> None:
        if self._submitted:
            requests, self._submitted = self._submitted, []
            waiting = tuple(request.reply for request in requests)
            self._send(waiting, partial(self._take, requests))

    def _send(self, waiting: tuple[asyncio.Future[Any], ...], act: Callable[[], None]) -> None:
        self._inbox.put((waiting, act))
        if self.failure is not None:
            # The thread may have looked for the last time before this came.
            _deliver([(reply, self.failure) for reply in self._left()])

    def _left(self) -> Iterator[asyncio.Future[Any]]:
        """Take all messages, and yield who waits for an answer to them; on any thread."""
        with contextlib.suppress(Empty):
            while True:
                waiting, _ = self._inbox.get_nowait()
                yield from waiting

    def _take(self, requests: Sequence[Request]) -> None:
        self._seen_counts.update(each.adapter for each in requests)
        for request in requests:
            self._submit(request)

    def _withdraw(self, request: Request) -> None:
        for decoder in (self._live, *self._pinned.values()):
            decoder.withdraw(request)

    def _end(self, error: AstraflowError) -> None:
        """Answer everything that waits with an error, for good."""
        self.failure = error
        for decoder in (self._live, *self._pinned.values()):
            self._replies += ((each.reply, ended) for each, ended in decoder.end(error))
        self._replies += ((reply, error) for reply in self._left())

    def _submit(self, request: Request) -> None:
        if request.version is None:
            self._live.add(request)
            return
        pinned = (request.adapter, request.version)
        weights = self.version_sets[request.adapter].serving(request.version)
        if weights is None:
            self._replies.append((request.reply, self._not_served(pinned)))
            return
        if pinned not in self._pinned:
            decoder = Decoder(twin_of(self._live.module), self._settings)
            decoder.install(weights)
            self._pinned[pinned] = decoder
            self.version_sets[request.adapter].keep(weights)
        self._pinned[pinned].add(request)

    def _commit(self, staged: Staged) -> SwapReport | AstraflowError | None:
        """Change weights between two steps, or leave them as they are, bit for bit."""
        start = time.perf_counter()
        versions = self.version_sets[staged.weights.adapter]
        if staged.would_change(versions.kept):
            return None
        try:
            staged.apply()
            self._install(staged.weights)
        except Exception as error:  # noqa: BLE001  whatever torch raises, the old version serves on
            staged.revert()
            if versions.weights is not None:
                self._install(versions.weights)
            return apply_failed(f"version {staged.weights.version} cannot be applied: {error}")
        versions.weights = staged.weights
        return SwapReport(
            version=staged.weights.version,
            pause_s=time.perf_counter() - start,
            inflight_count=int(self._live.running_counts[staged.weights.adapter]),
        )

    def _install(self, weights: Weights) -> None:
        self._live.install(weights)
        if self._kv is KvPolicy.RECOMPUTE:
            self._live.recompute(weights.adapter)

    def _pin(self, pinned: _PolicyVersion) -> AstraflowError | None:
        adapter, version = pinned
        weights = self.version_sets[adapter].serving(version)
        if weights is None:
            return self._not_served(pinned)
        self.version_sets[adapter].pin(weights)
        return None

    def _unpin(self, pinned: _PolicyVersion) -> None:
        adapter, version = pinned
        self.version_sets[adapter].unpin(version)
        self._let_go(pinned)

    def _let_go(self, pinned: _PolicyVersion) -> None:
        """Drop a version that is not pinned and has nothing to decode."""
        adapter, version = pinned
        decoder, versions = self._pinned.get(pinned), self.version_sets[adapter]
        if version in versions.pins or (decoder is not None and not decoder.is_idle):
            return
        if decoder is not None:
            self._past_sampled_counts += decoder.sampled_counts
            del self._pinned[pinned]
        versions.drop(version)

    def _not_served(self, pinned: _PolicyVersion) -> AstraflowError:
        adapter, version = pinned
        versions = self.version_sets[adapter]
        live = None if versions.weights is None else versions.weights.version
        return AstraflowError(
            Reason.VERSION_NOT_SERVED,
            f"version {version} is not served: {live} is live and "
            f"{sorted(versions.pins)} are pinned",
        )

    def _report(self) -> None:
        """Publish the load, then wake the event loop once for all that was answered."""
        decoders = [self._live, *self._pinned.values()]
        self.loads = self._loads(decoders)
        if self._replies:
            replies, self._replies = self._replies, []
            # The loop may have ended without closing the engine; then nobody waits.
            with contextlib.suppress(RuntimeError):
                replies[0][0].get_loop().call_soon_threadsafe(_deliver, replies)
        self._show(decoders)

    def _loads(self, decoders: list[Decoder]) -> tuple[EngineLoad, ...]:
        """Return the load of each policy; cache and time are those of all together."""
        places = self._settings.max_batch * self._settings.max_context * len(decoders)
        kv_fraction = sum(decoder.cached_token_count for decoder in decoders) / places
        running = sum(decoder.running_counts for decoder in decoders)
        sampled = self._past_sampled_counts + sum(each.sampled_counts for each in decoders)
        waiting = sum(each.waiting_counts for each in decoders)
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
