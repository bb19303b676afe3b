"""The tokens of one pass, as losses take them."""

from dataclasses import dataclass

import torch
from torch import Tensor

# exp(20) is 5e8: a ratio that large is noise; beyond 88 single precision has none.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """The k loss tokens of one pass, whole rows one after another.

    Attributes:
        logprobs: f[k], under the weights that are trained, with a gradient.
        sampler_logprobs: f[k], under what the tokens were sampled from.
        advantages: f[k].
        weights: f[k], factor of each token in the mean.
        rows: i64[k], in which row of the pass each stands, from 0.
        row_count: Rows of the pass.
        reference_logprobs: f[k], under the reference of a KL term; None: there is none.
    """

    logprobs: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    rows: Tensor
    row_count: int
    reference_logprobs: Tensor | None = None

    def row_sums(self, values: Tensor) -> Tensor:
        """Return f[k], for each token the sum over its row."""
        sums = values.new_zeros(self.row_count).index_add(0, self.rows, values)
        return sums[self.rows]

    def row_means(self, values: Tensor) -> Tensor:
        """Return f[k], for each token the mean over its row."""
        return self.row_sums(values) / self.row_sums(torch.ones_like(values))

    def rest_sums(self, values: Tensor) -> Tensor:
        """Return f[k], for each token the sum over itself and what follows it in its row."""
        exact = values.double()
        totals = exact.new_zeros(self.row_count).index_add(0, self.rows, exact)
        ends = totals.cumsum(0)
        return (ends[self.rows] - exact.cumsum(0) + exact).to(values.dtype)


def log_ratio(logprobs: Tensor, others: Tensor) -> Tensor:
    """Return log(p / q), f[k], within what single precision can raise e to."""
    return (logprobs - others).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
