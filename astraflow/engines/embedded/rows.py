"""Requests, and the rows that they are decoded in: columns of numpy arrays."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from astraflow.core.errors import AstraflowError
from astraflow.core.rollouts import UNROUTED, KvPolicy, VersionSpan
from astraflow.core.tasks import SamplingParams
from astraflow.engines.embedded.grammars import Guide
from astraflow.engines.embedded.shapes import MIN_ROWS, grown
from astraflow.engines.protocol import Generation, Likeliest, Watch


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One generation; it belongs to the engine's thread once it was handed over.

    Attributes:
        prompt: i32[n], n at least 1.
        sampling: Checked.
        stream: Of its random numbers.
        budget: Tokens that it may sample.
        version: Pins it; None: the live one.
        adapter: Of which policy, of those that share a base.
        reply: Resolved on the event loop.
        kv: What becomes of its cache when another version takes over.
        watch: Told what is sampled; None: nobody is.
        shown_count: Tokens that it was told of.
        guide: Follows its grammar; None: it has none.
        likeliest: Beside each token that it sampled, where that was asked for.
        takeovers: (tokens sampled before, version) of each version that sampled for it.
    """

    prompt: np.ndarray
    sampling: SamplingParams
    stream: np.uint64
    budget: int
    version: int | None
    reply: asyncio.Future[Generation]
    adapter: int = 0
    kv: KvPolicy = KvPolicy.KEEP
    watch: Watch | None = None
    shown_count: int = 0
    guide: Guide | None = None
    likeliest: list[Likeliest] = field(default_factory=list[Likeliest])
    takeovers: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def take_over(self, version: int, *, sampled_count: int) -> None:
        """Note that tokens from now on are of `version`."""
        if self.takeovers and self.takeovers[-1][0] == sampled_count:
            self.takeovers.pop()
        if not self.takeovers or self.takeovers[-1][1] != version:
            self.takeovers.append((sampled_count, version))

    def spans(self, sampled_count: int) -> tuple[VersionSpan, ...]:
        """Return which version sampled how many tokens."""
        starts = [*self.takeovers, (sampled_count, -1)]
        return tuple(
            VersionSpan(
                version=version,
                length=starts[i + 1][0] - start,
                kv=self.kv if start else KvPolicy.UNKNOWN,
            )
            for i, (start, version) in enumerate(self.takeovers)
            if starts[i + 1][0] > start
        )


# A request that left the engine, and what came of it.
Ended = tuple[Request, Generation | AstraflowError]


_FIELDS = np.dtype(
    [
        ("stream", "u8"),  # of its random numbers
        ("length", "i8"),  # tokens of prompt and completion
        ("prompt_length", "i8"),
        ("adapter", "i8"),  # whose weights sample it
        ("budget", "i8"),  # tokens to sample
        ("held", "i8"),  # tokens before it may stop
        ("token", "i8"),  # the last one
        ("top_k", "i8"),
        ("temperature", "f4"),
        ("top_p", "f4"),
        ("min_p", "f4"),
        ("frequency_penalty", "f4"),
        ("presence_penalty", "f4"),
        ("repetition_penalty", "f4"),
        ("is_greedy", "?"),
        ("is_truncated", "?"),
        ("is_penalised", "?"),
        ("is_guided", "?"),  # by a grammar
        ("tells_likeliest", "?"),
        ("ignores_eos", "?"),
        ("has_stops", "?"),  # of its own, beside the model's end tokens
    ],
    align=True,
)

_NO_TOP_K = 2**40


class DecodeRows:
    """Rows 0 to `count - 1`, close together; an ended row's place is taken by one from the end.

    Attributes:
        requests: One per row.
        fields: Structured array, one record per slot.
        tokens: i32[slots, columns], prompt and completion.
        logprobs: f32[slots, columns], set where sampled.
        experts: u16[slots, columns, layers, k], set where a token went through; None: of a dense
            model, or before the first prompt.
    """

    def __init__(self, *, limit: int, column_limit: int) -> None:
        self.requests: list[Request] = []
        self.fields = np.zeros(limit, _FIELDS)
        self.tokens = np.zeros((limit, min(64, column_limit)), np.int32)
        self.logprobs = np.zeros(self.tokens.shape, np.float32)
        self.experts: np.ndarray | None = None
        self._column_limit = column_limit

    @property
    def count(self) -> int:
        return len(self.requests)

    def column(self, name: str, rows: slice) -> np.ndarray:
        """Return one field of some rows: a view."""
        return self.fields[name][rows]

    def has(self, name: str, rows: slice) -> bool:
        return bool(self.fields[name][rows].any())

    @property
    def max_length(self) -> int:
        return int(self.fields["length"][: self.count].max(initial=0))

    def add(self, requests: Sequence[Request]) -> slice:
        """Append rows; return where they are."""
        first = self.count
        self._reserve(max(len(request.prompt) for request in requests))
        for row, request in enumerate(requests, first):
            self.fields[row] = _record(request)
            self.tokens[row, : len(request.prompt)] = request.prompt
        self.requests.extend(requests)
        return slice(first, self.count)

    def append(self, rows: slice, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Add one sampled token to each of some rows."""
        lengths = self.column("length", rows)
        self._reserve(int(lengths.max()) + 1)
        indexes = np.arange(len(tokens)) + rows.start
        self.tokens[indexes, lengths] = tokens
        self.logprobs[indexes, lengths] = logprobs
        self.column("token", rows)[:] = tokens
        lengths += 1

    def sampled(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a row's sampled tokens and their log-probabilities: views."""
        fields = self.fields[row]
        span = slice(int(fields["prompt_length"]), int(fields["length"]))
        return self.tokens[row, span], self.logprobs[row, span]

    def route(self, rows: slice, experts: np.ndarray) -> None:
        """Note which experts the first tokens of some rows went through, u16[n, L, layers, k]."""
        if self.experts is None:
            self.experts = np.full((*self.tokens.shape, *experts.shape[2:]), UNROUTED, np.uint16)
        length = min(experts.shape[1], self.experts.shape[1])
        self.experts[rows, :length] = experts[:, :length]

    def route_last(self, rows: slice, experts: np.ndarray) -> None:
        """Note which experts the newest tokens of some rows went through, u16[n, layers, k]."""
        if self.experts is not None:
            indexes = np.arange(len(experts)) + rows.start
            self.experts[indexes, self.column("length", rows) - 1] = experts

    def routed(self, row: int) -> np.ndarray | None:
        """Return the experts of a row's tokens; the last one has been nowhere yet. A copy."""
        if self.experts is None:
            return None
        routes = self.experts[row, : int(self.fields[row]["length"])].copy()
        routes[-1] = UNROUTED
        return routes

    def remove(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drop rows and close the gaps.

        Args:
            rows: i64[n], rising.

        Returns:
            Sources and targets, i64[m] each: what was moved where.
        """
        count = self.count - len(rows)
        targets = rows[rows < count]
        stays = np.ones(self.count - count, np.bool_)
        stays[rows[rows >= count] - count] = False
        sources = np.flatnonzero(stays) + count
        for array in (self.fields, self.tokens, self.logprobs, self.experts):
            if array is not None:
                array[targets] = array[sources]
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.requests[target] = self.requests[source]
        del self.requests[count:]
        return sources, targets

    def _reserve(self, columns: int) -> None:
        capacity = self.tokens.shape[1]
        if columns > capacity:
            more = grown(capacity, needed=columns, limit=self._column_limit) - capacity
            self.tokens = np.pad(self.tokens, ((0, 0), (0, more)))
            self.logprobs = np.pad(self.logprobs, ((0, 0), (0, more)))
            if self.experts is not None:
                self.experts = np.pad(self.experts, ((0, 0), (0, more), (0, 0), (0, 0)))


def _record(request: Request) -> np.ndarray:
    knobs = request.sampling
    is_greedy = knobs.temperature == 0
    values = {
        "stream": request.stream,
        "length": len(request.prompt),
        "prompt_length": len(request.prompt),
        "adapter": request.adapter,
        "budget": request.budget,
        "held": min(knobs.min_new_tokens, request.budget),
        "token": request.prompt[-1],
        "top_k": min(knobs.top_k or _NO_TOP_K, _NO_TOP_K),
        "temperature": 1.0 if is_greedy else knobs.temperature,
        "top_p": knobs.top_p,
        "min_p": knobs.min_p,
        "frequency_penalty": knobs.frequency_penalty,
        "presence_penalty": knobs.presence_penalty,
        "repetition_penalty": knobs.repetition_penalty,
        "is_greedy": is_greedy,
        "is_truncated": not is_greedy
        and (knobs.top_k is not None or knobs.top_p < 1 or knobs.min_p > 0),
        "is_penalised": knobs.frequency_penalty != 0
        or knobs.presence_penalty != 0
        or knobs.repetition_penalty != 1,
        "is_guided": request.guide is not None,
        "tells_likeliest": knobs.top_logprobs > 0,
        "ignores_eos": knobs.ignore_eos,
        "has_stops": bool(knobs.stop_token_ids or knobs.stop_strings or request.guide),
    }
    return np.array(tuple(values[name] for name in _FIELDS.names or ()), _FIELDS)


def distinct(requests: Sequence[Request]) -> tuple[np.ndarray, np.ndarray]:
    """Find requests of one policy that begin with the same prompt.

    Returns:
        i64[n], the first request of each of n prompts; i64[m], the prompt of each request.
    """
    numbers: dict[tuple[int, bytes], int] = {}
    keys = [(each.adapter, each.prompt.tobytes()) for each in requests]
    prompts = [numbers.setdefault(key, len(numbers)) for key in keys]
    _, firsts = np.unique(prompts, return_index=True)
    return firsts, np.array(prompts)


def kept_positions(ends: np.ndarray, *, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose the positions whose logits are computed: the ends, and enough for MIN_ROWS rows.

    Args:
        ends: i64[n], position of the last token of each prompt.
        length: Padded.

    Returns:
        Positions i64[k], rising; index into them of each row's end, i64[n].
    """
    needed = min(length, -(-MIN_ROWS // len(ends)))
    kept = np.unique(ends)
    if len(kept) < needed:
        others = np.setdiff1d(np.arange(length), kept)
        kept = np.union1d(kept, others[: needed - len(kept)])
    return kept, np.searchsorted(kept, ends)


def stretches(rows: np.ndarray, *, at_most: int) -> Iterator[slice]:
    """Yield neighbouring rows together.

    Args:
        rows: i64[n], rising.
        at_most: Rows of one stretch.

    Example:
        >>> [(part.start, part.stop) for part in stretches(np.array([0, 1, 2, 5]), at_most=2)]
        [(0, 2), (2, 3), (5, 6)]
    """
    for part in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
        for first in range(0, len(part), at_most):
            some = part[first : first + at_most]
            yield slice(int(some[0]), int(some[-1]) + 1)
