"""One completion of a server: requested, gathered from its pieces, and made a generation."""

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

import httpx
import numpy as np

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import FinishReason, KvPolicy, VersionSpan
from astraflow.core.tasks import SamplingParams
from astraflow.engines.checks import check_prompt, check_sampling, engine_failed
from astraflow.engines.protocol import Generation, Likeliest, Watch
from astraflow.engines.served.dialect import CompletionPiece, ServerRequest
from astraflow.engines.served.host import ServerHost
from astraflow.engines.served.routed_experts import ExpertLayout
from astraflow.engines.served.server import OTHER_FORM, ServerMeter, end_silence
from astraflow.engines.tokenizer import StopTexts
from astraflow.rpc.concurrency import beside

_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True, kw_only=True)
class CompletionBuilder:
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
    experts: ExpertLayout | None = None
    finish_reason: FinishReason | None = None
    _tokens: list[int] = field(default_factory=list[int])
    _logprobs: list[float] = field(default_factory=list[float])
    _likeliest: list[Likeliest] = field(default_factory=list[Likeliest])
    _versions: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    _told_experts: np.ndarray | None = None

    def add(self, piece: CompletionPiece) -> Sequence[int]:
        """Add a piece; return what of its tokens belongs to the completion.

        Behind a stop text only versions and experts count, which a server may tell at the very end.
        """
        own = None if self.version is None else [(self.version, len(piece.tokens))]
        self._versions += own or piece.versions
        self._told_experts = self._told_experts if piece.experts is None else piece.experts
        if self.is_over:
            return ()
        before = len(self._tokens)
        self._tokens += piece.tokens
        self._logprobs += piece.logprobs
        self._likeliest += piece.likeliest
        self.finish_reason = piece.finish_reason
        end = None if self.stops is None else self.stops.first_end(self._tokens, before)
        if end is not None:
            # With the first token that completes a stop text.
            del self._tokens[end:], self._logprobs[end:], self._likeliest[end:]
            self.finish_reason = FinishReason.STOP
        return self._tokens[before:]

    @property
    def is_over(self) -> bool:
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
            raise engine_failed("the server broke off a completion")
        if not np.isfinite(logprobs).all():
            raise engine_failed(
                "the server's log-probabilities are not finite: its weights are spoilt"
            )
        if self.is_greedy:
            logprobs[:] = 0.0
        experts, told = self.experts, self._told_experts
        routes = None
        if experts is not None and told is not None:
            routes = experts.routes(told, self.prompt_count + len(self._tokens))
        return Generation(
            tokens=np.asarray(self._tokens, np.int32),
            logprobs=logprobs,
            version_spans=self._spans(),
            finish_reason=reason,
            routed_experts=routes,
            constrained=np.ones(len(logprobs), np.bool_) if self.is_constrained else None,
            likeliest=self._likeliest,
        )

    def _spans(self) -> tuple[VersionSpan, ...]:
        spans: list[VersionSpan] = []
        left = len(self._tokens)
        for version, told in self._versions:
            length = min(told, left)
            left -= length
            if length and spans and spans[-1].version == version:
                spans[-1] = replace(spans[-1], length=spans[-1].length + length)
            elif length:
                kv = self.kv if spans else KvPolicy.UNKNOWN
                spans.append(VersionSpan(version=version, length=length, kv=kv))
        if left:
            raise engine_failed(f"the server tells no version of {left} tokens")
        return tuple(spans)


def new_salt() -> str:
    """Return one that nobody used: a server that is attached to has a past."""
    return uuid.uuid4().hex


class CompletionClient:
    """Asks a server for completions.

    Attributes:
        meter: Counts them.
        salt: Keeps what prompts leave in the server's cache from those that are asked for with
            another one: each change of its weights brings one.
    """

    def __init__(self, host: ServerHost, *, tells_experts: bool = False) -> None:
        self.meter = ServerMeter()
        self.salt = new_salt()
        self._dialect = host.dialect
        self._model = host.model
        self._server = host.server
        self._background = host.background
        self._kv = host.kv
        self._tells_experts = tells_experts
        host.background.start(self.meter.follow(host.server, host.dialect))
        host.background.start(end_silence(host.server, self.meter))

    async def sample(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        watch: Watch | None,
        *,
        version: int | None,
        adapter: str | None = None,
    ) -> Generation:
        """Sample one completion of what is live, which is `version`; see `Engine.generate`.

        With an adapter, which never changes, all its tokens are of that version.
        """
        model, tokenizer = self._model, self._model.tokenizer
        vocab_size, max_context = model.vocab_size, model.max_context
        check_prompt(np.asarray(prompt, np.int64), vocab_size=vocab_size, max_context=max_context)
        check_sampling(sampling, vocab_size=vocab_size, reads_text=tokenizer is not None)
        room = max_context - len(prompt)
        eos = () if sampling.ignore_eos else model.special.eos
        request = ServerRequest(
            request_id=uuid.uuid4().hex,
            prompt=prompt,
            sampling=replace(sampling, max_new_tokens=min(sampling.max_new_tokens or room, room)),
            stop_ids=tuple(sorted({*eos, *sampling.stop_token_ids})),
            never_sampled=tuple(sorted(model.special.never_sampled)),
            cache_salt=f"{self.salt} {version}",
            is_streamed=watch is not None or bool(sampling.stop_strings),
            adapter=adapter,
            tells_experts=self._tells_experts,
        )
        stops = None
        if sampling.stop_strings and tokenizer is not None:
            least = sampling.min_new_tokens
            stops = StopTexts(tokenizer, sampling.stop_strings, min_new_tokens=least)
        gathering = CompletionBuilder(
            kv=self._kv,
            stops=stops,
            is_greedy=sampling.temperature == 0,
            is_constrained=sampling.grammar is not None,
            version=None if adapter is None else version,
            prompt_count=len(prompt),
            experts=model.experts,
        )
        try:
            # Closing the client does not end a request whose connection is still being made.
            with self.meter.running():
                async with beside(self._server.life.failed()):
                    await self._gather(request, gathering, watch)
        except (httpx.HTTPError, *OTHER_FORM) as error:
            self._background.start(self._server.check_alive())
            raise engine_failed(f"the server broke off a completion: {error!r}") from error
        except AstraflowError as error:
            if error.reason is Reason.ENGINE_FAILED:
                self._background.start(self._server.check_alive())
            raise
        except asyncio.CancelledError:
            self._background.start(self._abort(request))
            raise
        return gathering.result()

    async def _gather(
        self, request: ServerRequest, gathering: CompletionBuilder, watch: Watch | None
    ) -> None:
        async with aclosing(self._dialect.generate(self._server.http, request)) as pieces:
            async for piece in pieces:
                tokens = gathering.add(piece)
                self.meter.note_sampled(len(tokens))
                if watch is not None and tokens:
                    watch(np.asarray(tokens, np.int32))
                if gathering.is_over and piece.finish_reason is None:
                    await self._abort(request)

    async def _abort(self, request: ServerRequest) -> None:
        with suppress(AstraflowError, httpx.HTTPError):
            await self._dialect.abort(self._server.http, request.request_id)
