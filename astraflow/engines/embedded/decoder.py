"""The decoder: one module, its cache and its rows, a step at a time."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import lcm

import numpy as np
import torch

from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import FinishReason
from astraflow.engines.checks import max_context_of
from astraflow.engines.devices import computed_dtype
from astraflow.engines.embedded.adapters import AdapterPlace, row_scales, slots_of
from astraflow.engines.embedded.cache import Beginning, PrefixCache, SlotCache
from astraflow.engines.embedded.grammars import cannot_follow
from astraflow.engines.embedded.model import Architecture, StepMasks, Stepper, cache_over, logits_of
from astraflow.engines.embedded.rows import (
    DecodeRows,
    Ended,
    Request,
    distinct,
    kept_positions,
    stretches,
)
from astraflow.engines.embedded.sampler import Sampler, StopRules
from astraflow.engines.embedded.shapes import coarse_length, padded_length, padded_rows
from astraflow.engines.embedded.weights import Weights
from astraflow.engines.modules import TORCH_TYPES, device_of
from astraflow.engines.protocol import Generation
from astraflow.engines.routers import RouteTaps
from astraflow.engines.tokenizer import FastTokenizer, SpecialIds

# Of one pass that reads running sequences anew: bounds the memory that it takes for a while.
_TOKENS_PER_RECOMPUTE = 8192

# Tokens of a row that are read anew as fast as they are copied.
_SHORT = 32

# Prompt tokens read between two decode steps, so that running rows are not kept waiting.
_PROMPT_TOKENS_PER_STEP = 8192

# Decode steps that a request may wait for others to be read with, unless so many of the running
# rows wait already: a pass over few rows costs almost as much as one over many.
_MAX_DELAY_STEPS = 3

_FULL_SHARE = 0.5

_GPU_ROW_STEP = 16

# A request that is watched, and i32[n] that it sampled since the last time.
Shown = tuple[Request, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSettings:
    """What all decoders of an engine share.

    Attributes:
        max_batch: Rows at once.
        max_context: Tokens of prompt and completion.
        adapters: Where those of each policy lie; empty: the weights are the whole model's.
        pads_coarsely: Whether prompts of unlike lengths are read together.
    """

    architecture: Architecture
    max_batch: int
    max_context: int
    dtype: torch.dtype
    device: torch.device
    sampler: Sampler
    stops: StopRules
    stepper: Stepper
    adapters: tuple[AdapterPlace, ...] = ()
    pads_coarsely: bool = False


class Decoder:
    """Continuous batching: rows join after their prompt and leave when they end.

    Requests take rows in order of arrival, as these become free.

    Attributes:
        sampled_counts: i64[policies], tokens sampled since the start.
    """

    def __init__(self, module: torch.nn.Module, settings: DecoderSettings) -> None:
        self.module = module
        self._parameters = tuple(module.parameters())
        self._slots = slots_of(module, settings.adapters)
        self._scales = row_scales(module, settings.adapters)
        self._taps = RouteTaps(module)
        self._settings = settings
        self._masks = StepMasks(settings.architecture, dtype=settings.dtype)
        self._versions: dict[int, int] = {}
        self.sampled_counts = np.zeros(len(self._slots), np.int64)
        self._waiting: deque[Request] = deque()
        self._waited_count = 0
        self._start()

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._rows.count

    @property
    def cached_token_count(self) -> int:
        return int(self._rows.column("length", slice(0, self._rows.count)).sum())

    @property
    def running_counts(self) -> np.ndarray:
        """i64[policies], sequences being decoded."""
        return self._counted(slice(0, self._rows.count))

    @property
    def waiting_counts(self) -> np.ndarray:
        """i64[policies], requests without a row."""
        policies = np.array([each.adapter for each in self._waiting], np.int64)
        return np.bincount(policies, minlength=len(self._slots))

    def unshown(self) -> list[Shown]:
        """Return what was sampled for watched requests since the last call."""
        shown: list[Shown] = []
        for row, request in enumerate(self._rows.requests):
            if request.watch is not None:
                tokens = self._rows.sampled(row)[0][request.shown_count :].copy()
                request.shown_count += len(tokens)
                shown.append((request, tokens))
        return shown

    def install(self, weights: Weights) -> None:
        """Decode with other weights from the next step on; the cache is kept."""
        self._slots[weights.adapter].install(weights)
        self._prefixes.drop(weights.adapter)
        self._versions[weights.adapter] = weights.version
        for row, request in enumerate(self._rows.requests):
            if request.adapter == weights.adapter:
                request.take_over(weights.version, sampled_count=len(self._rows.sampled(row)[0]))

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def withdraw(self, request: Request) -> None:
        """Forget a request that nobody waits for; one that ended already is none."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._rows.requests:
            self._remove(np.array([self._rows.requests.index(request)]))

    def advance(self) -> list[Ended]:
        """Read prompts for the free rows, then decode one step; return what ended."""
        admitted = self._next_admitted()
        try:
            ended = self._admit(admitted)
            if self._rows.count:
                ended += self._step()
        except torch.AcceleratorError:
            # Nothing more can be computed in this process.
            self._waiting.extend(admitted)
            raise
        except Exception as error:  # noqa: BLE001  whatever torch raises fails these rows only
            lost = {id(request): request for request in (*self._abandon(), *admitted)}
            return [(request, _failed(error)) for request in lost.values()]
        return ended

    def end(self, error: AstraflowError) -> list[Ended]:
        requests = [*self._abandon(), *self._waiting]
        self._waiting.clear()
        return [(request, error) for request in requests]

    def _next_admitted(self) -> list[Request]:
        admitted: list[Request] = []
        free_count = self._settings.max_batch - self._rows.count
        if self._delays_prompts(free_count):
            return admitted
        tokens = 0
        while self._waiting and len(admitted) < free_count:
            tokens += padded_length(len(self._waiting[0].prompt))
            if admitted and tokens > _PROMPT_TOKENS_PER_STEP:
                break
            admitted.append(self._waiting.popleft())
        return admitted

    def _delays_prompts(self, free_count: int) -> bool:
        """Whether requests wait a step longer for others."""
        waiting = len(self._waiting)
        is_few = waiting < min(free_count, _FULL_SHARE * self._rows.count)
        self._waited_count = self._waited_count + 1 if waiting and is_few else 0
        return 0 < self._waited_count <= _MAX_DELAY_STEPS

    def _admit(self, requests: Sequence[Request]) -> list[Ended]:
        """Read prompts, and sample the first token of each; return those that ended with it.

        Where a prompt goes on from what was sampled before, as the next turn of a chat does, only
        what is new of it is read.
        """
        fresh: list[Request] = []
        going_on: list[tuple[Request, Beginning]] = []
        for request in requests:
            beginning = self._prefixes.take(request.adapter, request.prompt)
            if beginning is not None:
                # Rounded up after what it begins with, it may be longer than the cache.
                end = padded_length(beginning.length + _new_length((request, beginning)))
                if end <= padded_length(self._settings.max_context):
                    going_on.append((request, beginning))
                    continue
            fresh.append(request)
        ended: list[Ended] = []
        for length, group in groupby(sorted(fresh, key=self._length), key=self._length):
            ended += self._prefill(list(group), length)
        for length, pairs in groupby(sorted(going_on, key=_new_length), key=_new_length):
            ended += self._read_on(list(pairs), length)
        return ended

    def _step(self) -> list[Ended]:
        """Sample one token for every row; return those that ended."""
        rows = slice(0, self._rows.count)
        computed = slice(0, self._padded(rows.stop))
        positions = self._rows.column("length", computed) - 1
        positions[rows.stop :] = 0
        length = padded_length(self._rows.max_length)
        ids = self._tensor(self._rows.column("token", computed).copy())
        places = self._tensor(positions)
        logits = self._settings.stepper.run(
            self.module,
            parameters=self._parameters,
            ids=ids,
            positions=places,
            masks=self._masks.of(places[:, None], length),
            states=self._cache.states(computed, length=length),
            shares=self._shares(self._rows.column("adapter", computed)),
        )
        experts = self._taps.last(computed.stop, 1)
        if experts is not None:
            self._rows.route_last(rows, experts[: rows.stop, 0])
        return self._sample(logits[: rows.stop], rows)

    def _abandon(self) -> list[Request]:
        """Drop all rows and the cache; return whose they were."""
        requests = self._rows.requests
        self._start()
        return requests

    def recompute(self, adapter: int) -> None:
        """Read a policy's running sequences anew with the installed weights, into the cache."""
        length = padded_length(max(1, self._rows.max_length))
        rows_per_pass = max(1, _TOKENS_PER_RECOMPUTE // length)
        found = np.flatnonzero(self._rows.column("adapter", slice(0, self._rows.count)) == adapter)
        for rows in stretches(found, at_most=rows_per_pass):
            count: int = rows.stop - rows.start
            self._read(
                self._ids(rows, length), np.arange(count), rows=rows, kept=np.zeros(1, np.int64)
            )

    def _start(self) -> None:
        settings = self._settings
        slots = self._padded(settings.max_batch)
        columns = padded_length(settings.max_context)
        self._rows = DecodeRows(limit=slots, column_limit=columns)
        self._cache = SlotCache(
            layer_count=settings.architecture.layer_count, row_limit=slots, limit=columns
        )
        # Half of what the cache itself may have.
        self._prefixes = PrefixCache(token_limit=settings.max_batch * settings.max_context // 2)

    def _length(self, request: Request) -> int:
        length = padded_length(len(request.prompt))
        if not self._settings.pads_coarsely:
            return length
        return coarse_length(length, limit=padded_length(self._settings.max_context))

    def _padded(self, row_count: int) -> int:
        return padded_rows(row_count, step=self._settings.architecture.row_step)

    def _prefill(self, requests: list[Request], length: int) -> list[Ended]:
        """Read each prompt once, however many requests begin with it."""
        rows = self._rows.add(requests)
        for request in requests:
            request.take_over(self._versions[request.adapter], sampled_count=0)
        firsts, prompts = distinct(requests)
        ends = self._rows.column("length", rows)[firsts] - 1
        kept, places = kept_positions(ends, length=length)
        ids = self._ids(rows, length)[firsts]
        logits = self._read(ids, prompts, rows=rows, kept=kept)
        experts = self._taps.last(*ids.shape)
        if experts is not None:
            self._rows.route(rows, experts[prompts])
        return self._sample(logits[np.arange(len(firsts)), places][prompts], rows)

    def _read_on(self, pairs: list[tuple[Request, Beginning]], length: int) -> list[Ended]:
        """Read what is new of each prompt; what it begins with goes back into the cache."""
        requests = [request for request, _ in pairs]
        rows = self._rows.add(requests)
        for request in requests:
            request.take_over(self._versions[request.adapter], sampled_count=0)
        known = np.array([beginning.length for _, beginning in pairs])
        positions = known[:, None] + np.arange(length)
        columns = padded_length(int(positions.max()) + 1)
        states = self._cache.states(rows, length=columns)
        for row, (_, beginning) in enumerate(pairs):
            for state, begun in zip(states, beginning.states, strict=True):
                state[row, :, : beginning.length] = begun
        places = self._tensor(positions)
        ends = self._rows.column("length", rows) - 1 - known
        kept, indexes = kept_positions(ends, length=length)
        logits = logits_of(
            self.module,
            cache_over(states, self._tensor(np.arange(len(pairs))), places),
            shares=self._shares(self._rows.column("adapter", rows)),
            input_ids=self._tensor(np.take_along_axis(self._ids(rows, columns), positions, 1)),
            position_ids=places,
            attention_mask=self._masks.of(places, columns),
            logits_to_keep=self._tensor(kept),
        )
        return self._sample(logits[np.arange(len(pairs)), indexes], rows)

    def _remember(self, row: int) -> None:
        """Keep what was computed of a row that ends, if it is all of the version that is live."""
        request = self._rows.requests[row]
        # The last token was sampled, and not yet read.
        length = int(self._rows.fields[row]["length"]) - 1
        if length < _SHORT or len(request.takeovers) > 1 or self._rows.experts is not None:
            return
        tokens = self._rows.tokens[row, :length]
        states = self._cache.states(slice(row, row + 1), length=length)
        self._prefixes.keep(request.adapter, tokens, _copied(states))

    def _ids(self, rows: slice, length: int) -> np.ndarray:
        """Return the tokens of rows, i64[rows, length]; what follows the last means nothing."""
        ids = np.zeros((rows.stop - rows.start, length), np.int64)
        columns = min(length, self._rows.tokens.shape[1])
        ids[:, :columns] = self._rows.tokens[rows, :columns]
        return ids

    def _read(
        self, ids: np.ndarray, prompts: np.ndarray, *, rows: slice, kept: np.ndarray
    ) -> torch.Tensor:
        """Fill the cache of some rows.

        Args:
            ids: i64[n, length], padded at the end.
            prompts: i64[m], which of the n prompts each row begins with.
            rows: Where the m rows are.
            kept: i64[k], positions whose logits are returned.

        Returns:
            Logits, [n, k, vocabulary].
        """
        count: int = ids.shape[0]
        length: int = ids.shape[1]
        _, firsts = np.unique(prompts, return_index=True)
        return logits_of(
            self.module,
            self._cache.for_prompts(self._tensor(prompts), first_row=rows.start, length=length),
            shares=self._shares(self._rows.column("adapter", rows)[firsts]),
            input_ids=self._tensor(ids),
            position_ids=self._tensor(np.arange(length))[None].expand(count, length),
            attention_mask=None,
            logits_to_keep=self._tensor(kept),
        )

    def _sample(self, logits: torch.Tensor, rows: slice) -> list[Ended]:
        tokens, logprobs = self._settings.sampler.draw(logits, self._rows, rows)
        spoilt = np.flatnonzero(~np.isfinite(logprobs))
        # What was computed with such weights is in the cache: all of it goes.
        if len(spoilt) and not logits[self._tensor(spoilt)].isfinite().all():
            versions = " or ".join(map(str, self._versions.values()))
            raise AstraflowError(
                Reason.ENGINE_FAILED,
                f"version {versions} gives logits that are not finite; publish sound weights",
            )
        self._rows.append(rows, tokens, logprobs)
        self.sampled_counts += self._counted(rows)
        ended = dict(self._settings.stops.ended(self._rows, rows))
        ended |= dict.fromkeys((spoilt + rows.start).tolist(), FinishReason.ABORT)
        results = [self._ended(row, ended[row]) for row in sorted(ended)]
        if ended:
            self._remove(np.array(sorted(ended)))
        return results

    def _ended(self, row: int, reason: FinishReason) -> Ended:
        self._remember(row)
        tokens, logprobs = self._rows.sampled(row)
        request = self._rows.requests[row]
        if reason is FinishReason.ABORT:
            return request, AstraflowError(
                Reason.INVALID_FIELD,
                f"the request's sampling leaves no token that may come: {request.sampling}",
                metadata={"field": "sampling"},
            )
        guide = request.guide
        if guide is not None and guide.error:
            return request, cannot_follow(guide.error)
        generation = Generation(
            tokens=tokens.copy(),
            logprobs=np.minimum(logprobs, 0),
            version_spans=request.spans(len(tokens)),
            finish_reason=reason,
            routed_experts=self._rows.routed(row),
            constrained=None if guide is None else np.array(guide.constrained, np.bool_),
            likeliest=request.likeliest,
        )
        return request, generation

    def _remove(self, rows: np.ndarray) -> None:
        length = self._rows.max_length
        sources, targets = self._rows.remove(rows)
        if len(sources):
            self._cache.move(self._tensor(sources), self._tensor(targets), length)

    def _counted(self, rows: slice) -> np.ndarray:
        return np.bincount(self._rows.column("adapter", rows), minlength=len(self._slots))

    def _shares(self, policies: np.ndarray) -> torch.Tensor | None:
        """Return [n, ranks], what rows of these policies, i64[n], take of each rank."""
        return None if self._scales is None else self._scales[self._tensor(policies)]

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(array, device=self._settings.device)


def _copied(states: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return a copy of the states of one row, in one launch where all are of one shape."""
    rows = [state[0] for state in states]
    if len({row.shape for row in rows}) == 1:
        return torch.stack(rows).unbind()
    return [row.clone() for row in rows]


def _failed(error: Exception) -> AstraflowError:
    if isinstance(error, AstraflowError):
        return error
    failure = AstraflowError(
        Reason.ENGINE_FAILED, f"a decode step failed: {type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    return failure


def _new_length(pair: tuple[Request, Beginning]) -> int:
    request, beginning = pair
    return padded_length(len(request.prompt) - beginning.length)


def _dtype_of(
    settings: EngineSettings, architecture: Architecture, device: torch.device
) -> torch.dtype:
    """Return what is computed in; most CPUs compute in f32 faster than in bf16."""
    if settings.dtype == "auto" and device.type == "cpu":
        return torch.float32
    return TORCH_TYPES[computed_dtype(settings, architecture.dtype)]


def build_decoder_settings(
    settings: EngineSettings,
    architecture: Architecture,
    *,
    special: SpecialIds,
    tokenizer: FastTokenizer | None,
) -> DecoderSettings:
    """Return how a decoder works; without a tokenizer there are no stop strings.

    Raises:
        AstraflowError: INVALID_FIELD when the settings do not fit.
    """
    device = device_of(settings.device, key="engine.device")
    if device.type == "cuda":
        # Each number of rows has graphs of its own, and a GPU computes some more in the same time.
        architecture = replace(architecture, row_step=lcm(architecture.row_step, _GPU_ROW_STEP))
    return DecoderSettings(
        architecture=architecture,
        max_batch=settings.max_batch,
        max_context=max_context_of(settings.max_context, architecture.max_context),
        dtype=_dtype_of(settings, architecture, device),
        device=device,
        sampler=Sampler(
            vocab_size=architecture.vocab_size,
            eos_ids=special.eos,
            never_sampled_ids=special.never_sampled,
            device=device,
        ),
        stops=StopRules(
            vocab_size=architecture.vocab_size, eos_ids=special.eos, tokenizer=tokenizer
        ),
        stepper=Stepper(is_recordable=architecture.is_static),
        pads_coarsely=device.type == "cuda",
    )
