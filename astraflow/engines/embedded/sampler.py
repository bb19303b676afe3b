"""Sampling: from logits to one token per row, and the log-probability it really had."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from astraflow.engines.embedded.grammars import Guide
from astraflow.engines.embedded.randomness import uniforms
from astraflow.engines.embedded.requests import Request
from astraflow.engines.embedded.rows import Rows
from astraflow.engines.protocol import UNCHANGED


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
        self._eos_ids = [token for token in eos_ids if token < vocab_size]
        banned = [token for token in never_sampled_ids if token < vocab_size]
        self._bias = None
        if banned:
            self._bias = torch.zeros(vocab_size, device=device)
            self._bias[banned] = -torch.inf
        self._device = device

    def draw(self, logits: torch.Tensor, table: Rows, rows: slice) -> tuple[np.ndarray, np.ndarray]:
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
            self._tell_likeliest(logprobs, table, rows)
        if table.has("is_guided", rows):
            for index, guide in _guides(table, rows):
                guide.take(int(tokens[index]))
        return tokens.cpu().numpy(), drawn.cpu().numpy()

    def _shaped(self, logits: torch.Tensor, table: Rows, rows: slice) -> torch.Tensor:
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

    def _constrain(self, logits: torch.Tensor, table: Rows, rows: slice) -> None:
        """Take away, in place, what grammars do not allow; note whether that changed the draw."""
        for index, guide in _guides(table, rows):
            forbidden = self._tensor(~guide.allowed())
            taken = torch.softmax(logits[index], dim=-1)[forbidden].sum()
            # The other way round, NaN would be no change.
            guide.constrained.append(not float(taken) <= UNCHANGED)
            logits[index, forbidden] = -torch.inf

    def _tell_likeliest(self, logprobs: torch.Tensor, table: Rows, rows: slice) -> None:
        requests: list[Request] = table.requests[rows]
        for index in np.flatnonzero(table.column("tells_likeliest", rows)).tolist():
            request = requests[index]
            found = logprobs[index].topk(request.sampling.top_logprobs)
            values, tokens = found.values.cpu().numpy(), found.indices.cpu().numpy()
            count = int(np.isfinite(values).sum())
            pairs = zip(tokens[:count].tolist(), values[:count].tolist(), strict=True)
            request.likeliest.append(list(pairs))

    def _unstoppable(
        self, logits: torch.Tensor, table: Rows, rows: slice, waits: list[int]
    ) -> torch.Tensor:
        """Forbid what would end rows that have too few tokens."""
        logits = logits.clone()
        requests: list[Request] = table.requests[rows]
        for index in waits:
            sampling = requests[index].sampling
            ids = [*sampling.stop_token_ids, *([] if sampling.ignore_eos else self._eos_ids)]
            logits[index, ids] = -torch.inf
        return logits

    def _penalised(self, logits: torch.Tensor, table: Rows, rows: slice) -> torch.Tensor:
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

    def _truncated(self, logits: torch.Tensor, table: Rows, rows: slice) -> torch.Tensor:
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


def _guides(table: Rows, rows: slice) -> Iterator[tuple[int, Guide]]:
    requests: list[Request] = table.requests[rows]
    for index, request in enumerate(requests):
        if request.guide is not None:
            yield index, request.guide
