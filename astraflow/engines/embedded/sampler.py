"""Sampling: from logits to one token per row, the log-probability it really had, and ends.

Randomness is by counter: the draw at a position depends on the seed and the position alone.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from astraflow.core.rollouts import FinishReason
from astraflow.engines.embedded.grammars import Guide
from astraflow.engines.embedded.rows import DecodeRows, Request
from astraflow.engines.protocol import UNCHANGED
from astraflow.engines.tokenizer import FastTokenizer, StopTexts

_GAMMA = np.uint64(0x9E3779B97F4A7C15)

_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)

_MIX_2 = np.uint64(0x94D049BB133111EB)

_MANTISSA_BITS = 24


def stream_of(seed: int) -> np.uint64:
    """Return the stream that a seed names; any int will do."""
    return _mixed(np.array([seed % 2**64], np.uint64) + _GAMMA)[0]


def uniforms(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Draw one number per row.

    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) with
    the position as its counter.

    Args:
        streams: u64[n], from `stream_of`.
        positions: i64[n], of the token in its sequence.

    Returns:
        f32[n] in [0, 1).
    """
    bits = _mixed(streams + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(64 - _MANTISSA_BITS)).astype(np.float32) * np.float32(
        2.0**-_MANTISSA_BITS
    )


def _mixed(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


class Sampler:
    """Draws for all rows at once.

    In order: repetition, frequency and presence penalties; ids that may not come; temperature;
    grammar; top-k, then top-p of what is left, then min-p. Rows without a knob skip its work, and
    their bits do not depend on rows that have it.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_ids: Iterable[int],
        never_sampled_ids: Iterable[int],
        device: torch.device,
    ) -> None:
        self._eos_ids, banned = list(eos_ids), list(never_sampled_ids)
        self._bias = None
        if banned:
            self._bias = torch.zeros(vocab_size, device=device)
            self._bias[banned] = -torch.inf
        self._device = device

    def draw(
        self, logits: torch.Tensor, table: DecodeRows, rows: slice
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sample one token for each of some rows.

        Args:
            logits: [n, vocabulary].
            table: All rows.
            rows: The n that the logits are of.

        Returns:
            Tokens i64[n]; log-probabilities f32[n] under the distribution drawn from, which is a
            single point, so 0, where the temperature is 0. NaN where the logits are not finite.
        """
        shaped = self._shaped(logits.float(), table, rows)
        logprobs = torch.log_softmax(shaped, dim=-1)
        # Not exp of the above: row by row, so that it has the same bits for any number of rows.
        cumulative = torch.cumsum(torch.softmax(shaped, dim=-1), dim=-1)
        ceilings = torch.nextafter(cumulative[:, -1], torch.zeros_like(cumulative[:, -1]))
        numbers = uniforms(table.column("stream", rows), table.column("length", rows))
        heights = torch.minimum(self._tensor(numbers) * cumulative[:, -1], ceilings)
        tokens = torch.searchsorted(cumulative, heights[:, None], right=True)
        tokens = tokens.clamp_(max=logits.shape[-1] - 1)
        drawn = logprobs.gather(1, tokens)[:, 0]
        tokens = tokens[:, 0]
        if table.has("is_greedy", rows):
            greedy = self._tensor(table.column("is_greedy", rows))
            tokens = torch.where(greedy, shaped.argmax(dim=-1), tokens)
            certain = shaped.amax(dim=-1) * 0  # NaN stays NaN
            drawn = torch.where(greedy, certain, drawn)
        if table.has("tells_likeliest", rows):
            self._record_likeliest(logprobs, table, rows)
        if table.has("is_guided", rows):
            for index, guide in _guides(table, rows):
                guide.take(int(tokens[index]))
        return tokens.cpu().numpy(), drawn.cpu().numpy()

    def _shaped(self, logits: torch.Tensor, table: DecodeRows, rows: slice) -> torch.Tensor:
        if table.has("is_penalised", rows):
            logits = self._penalised(logits, table, rows)
        if self._bias is not None:
            logits = logits + self._bias
        counts = table.column("length", rows) - table.column("prompt_length", rows)
        waits = counts < table.column("held", rows)
        if waits.any():
            logits = self._unstoppable(logits, table, rows, np.flatnonzero(waits).tolist())
        logits = logits / self._tensor(table.column("temperature", rows))[:, None]
        if table.has("is_guided", rows):
            self._constrain(logits, table, rows)
        if table.has("is_truncated", rows):
            logits = self._truncated(logits, table, rows)
        return logits

    def _constrain(self, logits: torch.Tensor, table: DecodeRows, rows: slice) -> None:
        """Take away, in place, what grammars do not allow; note whether that changed the draw."""
        for index, guide in _guides(table, rows):
            forbidden = self._tensor(~guide.allowed())
            taken = torch.softmax(logits[index], dim=-1)[forbidden].sum()
            # The other way round, NaN would be no change.
            guide.constrained.append(not float(taken) <= UNCHANGED)
            logits[index, forbidden] = -torch.inf

    def _record_likeliest(self, logprobs: torch.Tensor, table: DecodeRows, rows: slice) -> None:
        requests: list[Request] = table.requests[rows]
        for index in np.flatnonzero(table.column("tells_likeliest", rows)).tolist():
            request = requests[index]
            found = logprobs[index].topk(request.sampling.top_logprobs)
            values, tokens = found.values.cpu().numpy(), found.indices.cpu().numpy()
            count = int(np.isfinite(values).sum())
            pairs = zip(tokens[:count].tolist(), values[:count].tolist(), strict=True)
            request.likeliest.append(list(pairs))

    def _unstoppable(
        self, logits: torch.Tensor, table: DecodeRows, rows: slice, waits: list[int]
    ) -> torch.Tensor:
        """Forbid what would end rows that have too few tokens."""
        logits = logits.clone()
        requests: list[Request] = table.requests[rows]
        for index in waits:
            sampling = requests[index].sampling
            ids = [*sampling.stop_token_ids, *([] if sampling.ignore_eos else self._eos_ids)]
            logits[index, ids] = -torch.inf
        return logits

    def _penalised(self, logits: torch.Tensor, table: DecodeRows, rows: slice) -> torch.Tensor:
        """Lower what came before.

        Repetition counts the prompt too and scales (Keskar et al. 2019, CTRL, section 4.1);
        frequency and presence count the completion and subtract.
        """
        chosen = np.flatnonzero(table.column("is_penalised", rows)) + rows.start
        lengths = table.fields["length"][chosen]
        columns = np.arange(int(lengths.max()))
        tokens = self._tensor(table.tokens[chosen, : len(columns)].astype(np.int64))
        seen = columns < lengths[:, None]
        sampled = seen & (columns >= table.fields["prompt_length"][chosen][:, None])
        part = logits[self._tensor(chosen - rows.start)]

        def knob(name: str) -> torch.Tensor:
            return self._tensor(table.fields[name][chosen])[:, None]

        def counts(where: np.ndarray) -> torch.Tensor:
            return torch.zeros_like(part).scatter_add_(1, tokens, self._tensor(where).float())

        factor = torch.where(counts(seen) > 0, knob("repetition_penalty"), 1.0)
        part = torch.where(part > 0, part / factor, part * factor)
        frequency = counts(sampled)
        part = part - frequency * knob("frequency_penalty")
        part = part - (frequency > 0) * knob("presence_penalty")
        return logits.index_copy(0, self._tensor(chosen - rows.start), part)

    def _truncated(self, logits: torch.Tensor, table: DecodeRows, rows: slice) -> torch.Tensor:
        """Take away the tail, in rows that ask for it."""
        chosen = np.flatnonzero(table.column("is_truncated", rows))
        index = self._tensor(chosen)

        def knob(name: str) -> torch.Tensor:
            return self._tensor(table.column(name, rows)[chosen])[:, None]

        part, order = logits[index].sort(dim=-1, descending=True, stable=True)
        ranks = torch.arange(part.shape[-1], device=part.device)
        part = part.masked_fill(ranks >= knob("top_k"), -torch.inf)
        weights = torch.softmax(part, dim=-1)
        mass_before = torch.cumsum(weights, dim=-1) - weights
        top_p, min_p = knob("top_p"), knob("min_p")
        dropped = (top_p < 1) & (mass_before >= top_p) | (weights < min_p * weights[:, :1])
        dropped[:, 0] = False
        part = part.masked_fill(dropped, -torch.inf)
        return logits.index_copy(0, index, torch.empty_like(part).scatter_(1, order, part))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(array, device=self._device)


def _guides(table: DecodeRows, rows: slice) -> Iterator[tuple[int, Guide]]:
    requests: list[Request] = table.requests[rows]
    for index, request in enumerate(requests):
        if request.guide is not None:
            yield index, request.guide


class StopRules:
    """End tokens, stop ids, stop strings, grammars and budgets."""

    def __init__(
        self, *, vocab_size: int, eos_ids: Iterable[int], tokenizer: FastTokenizer | None
    ) -> None:
        self._is_eos = np.zeros(vocab_size, np.bool_)
        self._is_eos[list(eos_ids)] = True
        self._tokenizer = tokenizer

    def ended(self, table: DecodeRows, rows: slice) -> list[tuple[int, FinishReason]]:
        """Return which of some rows end with their last token, by rising row, and why."""
        stopped = self._is_eos[table.column("token", rows)] & ~table.column("ignores_eos", rows)
        for index in np.flatnonzero(table.column("has_stops", rows)).tolist():
            stopped[index] |= self._stops_row(table, rows.start + index)
        counts = table.column("length", rows) - table.column("prompt_length", rows)
        spent = counts >= table.column("budget", rows)
        return [
            (rows.start + index, FinishReason.STOP if stopped[index] else FinishReason.LENGTH)
            for index in np.flatnonzero(stopped | spent).tolist()
        ]

    def _stops_row(self, table: DecodeRows, row: int) -> bool:
        sampling, guide = table.requests[row].sampling, table.requests[row].guide
        if guide is not None and guide.is_over:
            return True
        tokens, tokenizer = table.sampled(row)[0], self._tokenizer
        if int(tokens[-1]) in sampling.stop_token_ids:
            return True
        if not sampling.stop_strings or len(tokens) < sampling.min_new_tokens or tokenizer is None:
            return False
        stops = StopTexts(tokenizer, sampling.stop_strings)
        return stops.ends(tokens[-stops.span :].tolist())
