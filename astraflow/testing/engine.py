"""A small engine that needs no model: it draws letters, or says what a test tells it to."""

import asyncio
import string
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import FinishReason, spans_of
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import SwapReport, TensorUpdate, WeightUpdate
from astraflow.engines.protocol import EngineLoad, Generation, Watch

ALPHABET = string.ascii_letters + string.digits + string.punctuation + " \n"


class CharTokenizer:
    """One token per letter; token n is the n-th letter of the alphabet."""

    def __init__(self, alphabet: str = ALPHABET) -> None:
        self.alphabet = alphabet
        self._ids = {letter: number for number, letter in enumerate(alphabet)}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Sequence[int]:
        """Return the ids of a text; there are no special tokens.

        Raises:
            AstraflowError: INVALID_FIELD for a letter that the alphabet lacks.
        """
        del add_special_tokens
        strange = set(text) - self._ids.keys()
        if strange:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"the alphabet lacks {sorted(strange)}; give CharTokenizer one that has them",
            )
        return [self._ids[letter] for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return "".join(self.alphabet[token] for token in tokens)


class SmallEngine:
    """Draws each token from its (seed, position, version) alone, or answers as it is told.

    Attributes:
        version: What is live.
        tensors: Bits of the live weights by name.
        pins: Versions that are kept, by count.
        swaps: Every update so far.
        refusals: Raised by the next swaps, one each.
        open: Cleared, it holds every generation between two tokens.
        running: Generations in progress.
        sampled: Tokens so far.
        token_s: Seconds per token.
    """

    name = "small/1"
    tells_experts = False

    def __init__(
        self,
        tokenizer: CharTokenizer | None = None,
        *,
        answer: Callable[[str], str] | None = None,
        max_context_token_count: int = 4096,
        token_s: float = 0.0,
    ) -> None:
        """Start without weights.

        Args:
            tokenizer: Its alphabet is drawn from.
            answer: Told the text so far, says what comes next; None: letters are drawn.
            max_context_token_count: Prompt and completion together.
            token_s: Seconds per token of every generation, however many run.
        """
        self.token_s = token_s
        self.max_context_token_count = max_context_token_count
        self.version: int | None = None
        self.tensors: dict[str, np.ndarray] = {}
        self.pins = Counter[int]()
        self.swaps: list[WeightUpdate] = []
        self.refusals: list[AstraflowError] = []
        self.open = asyncio.Event()
        self.open.set()
        self.running = 0
        self.sampled = 0
        self._tokenizer = tokenizer or CharTokenizer()
        self._answer = answer
        self._changed = asyncio.Condition()

    @property
    def pinned_versions(self) -> frozenset[int]:
        """Older versions that can still be asked for."""
        return frozenset(self.pins)

    @property
    def keeps_versions(self) -> bool:
        """Whether a pinned version serves on beside newer ones."""
        return True

    def restore_from(self, source: Callable[[], WeightUpdate]) -> None:
        """Nothing to do: it loses no weights."""

    async def until(self, claim: Callable[[], object]) -> None:
        """Wait until the start of a generation, a swap or a pin makes a claim true."""
        async with self._changed:
            await self._changed.wait_for(claim)

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        version: int | None = None,
        watch: Watch | None = None,
    ) -> Generation:
        """Sample one completion.

        Raises:
            AstraflowError: VERSION_NOT_SERVED.
        """
        if version is not None:
            self._require(version)
        self.running += 1
        await self._change()
        try:
            return await self._generate(prompt, sampling, version, watch)
        finally:
            self.running -= 1

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """Make a version live.

        Raises:
            AstraflowError: What `refusals` has.
        """
        if self.refusals:
            raise self.refusals.pop(0)
        for change in update.tensors:
            self._apply(change)
        self.swaps.append(update)
        self.version = update.version
        await self._change()
        return SwapReport(version=update.version, pause_s=0.001, inflight_count=self.running)

    async def pin(self, version: int) -> None:
        """Keep a version.

        Raises:
            AstraflowError: VERSION_NOT_SERVED.
        """
        self._require(version)
        self.pins[version] += 1
        await self._change()

    async def unpin(self, version: int) -> None:
        self.pins[version] -= 1
        if not self.pins[version]:
            del self.pins[version]

    def load(self) -> EngineLoad:
        return EngineLoad(
            running_count=self.running,
            queued_count=0,
            sampled_token_count=self.sampled,
            kv_fraction=0.25,
            busy_s=0.0,
        )

    async def close(self) -> None:
        """Do nothing: it holds nothing."""

    async def _generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        pinned: int | None,
        watch: Watch | None,
    ) -> Generation:
        script = None
        if self._answer is not None:
            script = self._tokenizer.encode(self._answer(self._tokenizer.decode(prompt)))
        count = sampling.max_new_tokens if script is None else len(script)
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        for step in range(min(count, sampling.max_new_tokens)):
            await self.open.wait()
            await asyncio.sleep(self.token_s)
            version = self._live(pinned)
            draw = self._draw(sampling.seed or 0, len(prompt) + step, version)
            token, logprob = draw if script is None else (script[step], 0.0)
            tokens.append(token)
            logprobs.append(logprob)
            versions.append(version)
            self.sampled += 1
            if watch is not None:
                watch(np.array([token], np.int32))
        is_whole = script is not None and len(tokens) == len(script)
        return Generation(
            tokens=np.array(tokens, np.int32),
            logprobs=np.array(logprobs, np.float32),
            version_spans=spans_of(np.array(versions, np.int64)),
            finish_reason=FinishReason.STOP if is_whole else FinishReason.LENGTH,
        )

    def _draw(self, seed: int, position: int, version: int) -> tuple[int, float]:
        size = len(self._tokenizer.alphabet)
        rng = np.random.default_rng([seed, position, version])
        weights = rng.random(size) + 0.1
        shares = weights / weights.sum()
        token = int(rng.choice(size, p=shares))
        return token, float(np.log(shares[token]))

    def _live(self, pinned: int | None) -> int:
        if pinned is not None:
            return pinned
        if self.version is None:
            raise AstraflowError(Reason.VERSION_NOT_SERVED, "no version was swapped in yet")
        return self.version

    def _require(self, version: int) -> None:
        if version != self.version and version not in self.pins:
            raise AstraflowError(Reason.VERSION_NOT_SERVED, f"version {version} is not here")

    def _apply(self, change: TensorUpdate) -> None:
        spec = change.spec
        if change.indices is None:
            self.tensors[spec.name] = change.values.reshape(spec.shape).copy()
        else:
            self.tensors[spec.name].reshape(-1)[change.indices] = change.values

    async def _change(self) -> None:
        async with self._changed:
            self._changed.notify_all()
