"""Asking: one completion of a server, from the call to its result."""

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import replace

import httpx
import numpy as np

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import KvPolicy
from astraflow.core.tasks import SamplingParams
from astraflow.engines.checks import check_prompt, check_sampling
from astraflow.engines.protocol import Generation, Watch
from astraflow.engines.served.background import Background
from astraflow.engines.served.dialect import Dialect, ServerRequest
from astraflow.engines.served.gathering import Gathering
from astraflow.engines.served.meter import Meter
from astraflow.engines.served.model import Model
from astraflow.engines.served.server import Server
from astraflow.engines.stop_texts import StopTexts


class Asking:
    """Asks a server for completions."""

    def __init__(
        self,
        dialect: Dialect,
        *,
        model: Model,
        server: Server,
        meter: Meter,
        background: Background,
        kv: KvPolicy,
        tells_experts: bool = False,
    ) -> None:
        self._dialect = dialect
        self._model = model
        self._server = server
        self._meter = meter
        self._background = background
        self._kv = kv
        self._tells_experts = tells_experts

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
        request = replace(
            self.request(prompt, sampling, is_watched=watch is not None),
            cache_salt=f"version {version}",
            adapter=adapter,
        )
        gathering = Gathering(
            kv=self._kv,
            stops=self._stops(sampling),
            is_greedy=sampling.temperature == 0,
            is_constrained=sampling.grammar is not None,
            version=None if adapter is None else version,
            prompt_count=len(prompt),
            experts=self._model.experts,
        )
        try:
            with self._meter.running():
                await self._gather(request, gathering, watch)
        except httpx.HTTPError as error:
            self._background.start(self._server.look())
            raise AstraflowError(
                Reason.ENGINE_FAILED,
                f"the server broke off a completion: {error!r}",
                retryable=True,
            ) from error
        except AstraflowError as error:
            if error.reason is Reason.ENGINE_FAILED:
                self._background.start(self._server.look())
            raise
        except asyncio.CancelledError:
            self._background.start(self._abort(request))
            raise
        return gathering.result()

    def request(
        self, prompt: Sequence[int], sampling: SamplingParams, *, is_watched: bool
    ) -> ServerRequest:
        """Return a sound request.

        Raises:
            AstraflowError: CONTEXT_TOO_LONG or INVALID_FIELD.
        """
        model = self._model
        check_prompt(
            np.asarray(prompt, np.int64),
            vocab_size=model.vocab_size,
            max_context=model.max_context,
        )
        check_sampling(
            sampling, vocab_size=model.vocab_size, reads_text=model.tokenizer is not None
        )
        room = model.max_context - len(prompt)
        eos = () if sampling.ignore_eos else model.special.eos
        return ServerRequest(
            request_id=uuid.uuid4().hex,
            prompt=prompt,
            sampling=replace(sampling, max_new_tokens=min(sampling.max_new_tokens or room, room)),
            stop_ids=tuple(sorted({*eos, *sampling.stop_token_ids})),
            never_sampled=tuple(sorted(model.special.never_sampled)),
            is_streamed=is_watched or bool(sampling.stop_strings),
            tells_experts=self._tells_experts,
        )

    async def _gather(
        self, request: ServerRequest, gathering: Gathering, watch: Watch | None
    ) -> None:
        async with aclosing(self._dialect.generate(self._server.http, request)) as pieces:
            async for piece in pieces:
                tokens = gathering.add(piece)
                self._meter.note_sampled(len(tokens))
                if watch is not None and tokens:
                    watch(np.asarray(tokens, np.int32))
                if gathering.is_over and piece.finish_reason is None:
                    await self._abort(request)

    def _stops(self, sampling: SamplingParams) -> StopTexts | None:
        tokenizer = self._model.tokenizer
        if not sampling.stop_strings or tokenizer is None:
            return None
        return StopTexts(tokenizer, sampling.stop_strings, min_new_tokens=sampling.min_new_tokens)

    async def _abort(self, request: ServerRequest) -> None:
        with suppress(AstraflowError, httpx.HTTPError):
            await self._dialect.abort(self._server.http, request.request_id)
