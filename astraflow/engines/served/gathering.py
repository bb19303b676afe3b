"""Gathering: the pieces of one completion, until they are a generation."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import FinishReason, KvPolicy, VersionSpan
from astraflow.engines.protocol import Generation, Likeliest
from astraflow.engines.served.dialect import Piece
from astraflow.engines.served.told_routes import Experts
from astraflow.engines.stop_texts import StopTexts

_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True, kw_only=True)
class Gathering:
    """Puts pieces together.

    Attributes:
        kv: What becomes of the cache when another version takes over.
        stops: Texts that end it; None: none do.
        is_greedy: Whether every token was certain, so that its log-probability is 0.
        is_constrained: Whether a grammar may have changed every draw; servers do not tell which.
        version: What every token is of, whatever happens meanwhile; None: as the server tells.
        prompt_count: Tokens of the prompt.
        experts: How the model chooses them; None: it is dense.
        finish_reason: None while it goes on.
    """

    kv: KvPolicy
    stops: StopTexts | None
    is_greedy: bool
    is_constrained: bool = False
    version: int | None = None
    prompt_count: int = 0
    experts: Experts | None = None
    finish_reason: FinishReason | None = None
    _tokens: list[int] = field(default_factory=list[int])
    _logprobs: list[float] = field(default_factory=list[float])
    _likeliest: list[Likeliest] = field(default_factory=list[Likeliest])
    _versions: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    _told: np.ndarray | None = None

    def add(self, piece: Piece) -> Sequence[int]:
        """Add a piece; return what of its tokens belongs to the completion.

        Behind a stop text only versions and experts count, which a server may tell at the very end.
        """
        self._versions += self._versions_of(piece)
        self._told = self._told if piece.experts is None else piece.experts
        if self.is_over:
            return ()
        before = len(self._tokens)
        self._tokens += piece.tokens
        self._logprobs += piece.logprobs
        self._likeliest += piece.likeliest
        self.finish_reason = piece.finish_reason
        if self.stops is not None:
            self._cut(before)
        return self._tokens[before:]

    @property
    def is_over(self) -> bool:
        """Whether it has all its tokens."""
        return self.finish_reason is not None

    def result(self) -> Generation:
        """Return the whole.

        Raises:
            AstraflowError: ENGINE_FAILED when the server did not finish it, told too little or
                computed with what is not finite.
        """
        logprobs = np.asarray(self._logprobs, np.float32)
        reason = self.finish_reason
        if reason is None or reason not in _ENDS or len(logprobs) != len(self._tokens):
            raise _failed("the server broke off a completion")
        if not np.isfinite(logprobs).all():
            raise _failed("the server's log-probabilities are not finite: its weights are spoilt")
        if self.is_greedy:
            logprobs[:] = 0.0
        return Generation(
            tokens=np.asarray(self._tokens, np.int32),
            logprobs=logprobs,
            version_spans=self._spans(),
            finish_reason=reason,
            routed_experts=self._routes(),
            constrained=np.ones(len(logprobs), np.bool_) if self.is_constrained else None,
            likeliest=self._likeliest,
        )

    def _routes(self) -> np.ndarray | None:
        if self._told is None or self.experts is None:
            return None
        return self.experts.routes(self._told, self.prompt_count + len(self._tokens))

    def _versions_of(self, piece: Piece) -> Sequence[tuple[int, int]]:
        return piece.versions if self.version is None else [(self.version, len(piece.tokens))]

    def _cut(self, before: int) -> None:
        """End it with the first token that completes a stop text."""
        end = self.stops.first_end(self._tokens, before) if self.stops is not None else None
        if end is not None:
            del self._tokens[end:], self._logprobs[end:], self._likeliest[end:]
            self.finish_reason = FinishReason.STOP

    def _spans(self) -> tuple[VersionSpan, ...]:
        spans: list[VersionSpan] = []
        left = len(self._tokens)
        for version, length in _merged(self._versions):
            kept = min(length, left)
            left -= kept
            if kept:
                kv = self.kv if spans else KvPolicy.UNKNOWN
                spans.append(VersionSpan(version=version, length=kept, kv=kv))
        if left:
            raise _failed(f"the server tells no version of {left} tokens")
        return tuple(spans)


def _merged(versions: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for version, length in versions:
        if merged and merged[-1][0] == version:
            merged[-1] = (version, merged[-1][1] + length)
        else:
            merged.append((version, length))
    return merged


def _failed(message: str) -> AstraflowError:
    return AstraflowError(Reason.ENGINE_FAILED, message, retryable=True)
