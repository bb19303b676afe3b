"""Stops: which rows end after a decode step."""

from collections.abc import Iterable

import numpy as np

from astraflow.core.rollouts import FinishReason
from astraflow.core.tasks import SamplingParams
from astraflow.engines.embedded.rows import Rows
from astraflow.engines.stop_texts import StopTexts
from astraflow.engines.tokenizer import Tokenizer


class Stops:
    """End tokens, stop ids, stop strings, grammars and budgets."""

    def __init__(
        self, *, vocab_size: int, eos_ids: Iterable[int], tokenizer: Tokenizer | None
    ) -> None:
        self._is_eos = np.zeros(vocab_size, np.bool_)
        self._is_eos[[token for token in eos_ids if token < vocab_size]] = True
        self._tokenizer = tokenizer

    def ended(self, table: Rows, rows: slice) -> list[tuple[int, FinishReason]]:
        """Return which of some rows end with their last token, by rising row, and why."""
        stopped = self._is_eos[table.column("token", rows)] & ~table.column("ignores_eos", rows)
        for index in np.flatnonzero(table.column("has_stops", rows)).tolist():
            stopped[index] |= self._asked(table, rows.start + index)
        counts = table.column("length", rows) - table.column("prompt_length", rows)
        spent = counts >= table.column("budget", rows)
        return [
            (rows.start + index, FinishReason.STOP if stopped[index] else FinishReason.LENGTH)
            for index in np.flatnonzero(stopped | spent).tolist()
        ]

    def _asked(self, table: Rows, row: int) -> bool:
        sampling, guide = table.requests[row].sampling, table.requests[row].guide
        if guide is not None and guide.is_over:
            return True
        tokens = table.sampled(row)[0]
        return int(tokens[-1]) in sampling.stop_token_ids or self._completes(tokens, sampling)

    def _completes(self, tokens: np.ndarray, sampling: SamplingParams) -> bool:
        """Return whether the last token completes a stop string."""
        if not sampling.stop_strings or len(tokens) < sampling.min_new_tokens:
            return False
        tokenizer = self._tokenizer
        if tokenizer is None:
            return False
        stops = StopTexts(tokenizer, sampling.stop_strings)
        return stops.ends(tokens[-stops.span :].tolist())
