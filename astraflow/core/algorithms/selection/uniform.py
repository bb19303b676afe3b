"""Uniform: every prompt of a pass is asked for, as the data set has them."""

from dataclasses import dataclass

from astraflow.core.algorithms.points import PromptSelector


@dataclass(slots=True, kw_only=True)
class UniformSelector(PromptSelector):
    """Admits everything."""
