"""A Hugging Face causal language model, as a trainer uses it, and torch around it."""

import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.modules import (
    SCORE,
    device_of,
    empty_causal_model,
    length_bounds,
    read_causal_model,
    use_onednn,
)
from astraflow.engines.routers import RouteReplay
from astraflow.trainers import packed_rows
from astraflow.trainers.packed_rows import PackedRows
from astraflow.trainers.tensors import to_tensor

if TYPE_CHECKING:
    from astraflow.trainers.context_parallel import RowGroup

Made = TypeVar("Made")

# Rows laid out together differ by this share, at most, of what a wrong mask would change: far above
# rounding, also in bf16, and far below what a model that ignores its mask shows.
_ROUNDING = 0.1
# Two rows that a model is asked with, and how many tokens they begin with in common.
_ASKED: Final = ((3, 4, 5, 6, 7), (3, 4, 5, 9, 8))
_SHARED: Final = 3

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Branches:
    """Where the tokens of a pass stand whose rows branch off one another.

    Tokens come in the order of a walk through their tree, parents first: what token i sees are
    the tokens j <= i whose branch, `[j, ends[j])`, it lies in.

    Attributes:
        positions: i64[n, L], of each token in its row.
        ends: i64[n, L], one past the last token that continues it; of padding the token itself.
    """

    positions: Tensor
    ends: Tensor

    @property
    def mask(self) -> Tensor:
        """bool[n, 1, L, L], which token (row) sees which (column)."""
        index = torch.arange(self.ends.shape[1], device=self.ends.device)
        return ((index[:, None] >= index) & (index[:, None] < self.ends[:, None, :]))[:, None]


Layout = Branches | PackedRows | None
"""How rows lie in a pass: branch off one another, follow one another, or each alone and padded."""


class CausalModel:
    """Answers with logits at chosen positions only.

    The output layer is the widest of all: on positions that no loss applies to it would be
    wasted. The positions are picked from its input, so whatever a model does to its logits
    afterwards (scaling, soft caps) is still done.

    Attributes:
        never_sampled: i64[b], on the host, rising.
        routes: Which experts the next passes take, with the gradients of these.
        row_groups: Other ranks that have the same rows, and compute a part of them each.
        makes_scores: Whether it is a reward model or a critic, whose logits are one number.
    """

    def __init__(self, module: nn.Module, *, never_sampled: Iterable[int] = ()) -> None:
        """Wrap a module.

        Args:
            module: A causal model of transformers, in f32.
            never_sampled: Ids that the engine never draws, such as padding: they are no part
                of the distribution that is trained either.
        """
        # Dropout is off: log-probabilities are compared with those of the sampler.
        self.module = module.eval()
        self._device: torch.device | None = None
        # A tokenizer may have more ids than the model, such as padding that was added to it.
        known = sorted(each for each in never_sampled if each < self.vocabulary_size)
        self.never_sampled = torch.tensor(known, dtype=torch.long)
        self._chosen: Tensor | None = None
        self._read: Callable[[Tensor], Any] | None = None
        self._made: Any = None
        self._hidden: Tensor | None = None
        self.routes = RouteReplay(module)
        self.row_groups: Sequence[RowGroup] = ()
        score = getattr(module, SCORE, None)
        self.makes_scores = score is not None
        self._head: nn.Module | None = score or cast("Any", module).get_output_embeddings()
        if self._head is not None:
            self._head.register_forward_pre_hook(self._choose)

    @property
    def device(self) -> torch.device:
        return self._device or next(self.module.parameters()).device

    def compute_on(self, device: torch.device) -> None:
        """Note that weights come to a device when they are needed, wherever they are kept."""
        self._device = device

    @property
    def vocabulary_size(self) -> int:
        return int(cast("Any", self.module).get_input_embeddings().num_embeddings)

    def logits(self, tokens: Tensor, chosen: Tensor, *, layout: Layout = None) -> Tensor:
        """Return logits after chosen positions.

        Args:
            tokens: i64[n, L], padded on the right with any token.
            chosen: i64[k], flat indices into `tokens`.
            layout: Of rows; for a model that `takes_branches`, or of which nothing is `unpacked`.

        Returns:
            [k, vocabulary] in the model's dtype.
        """
        logits = self._run(tokens, chosen, layout)
        if self._hidden is None:
            return logits.flatten(0, 1).index_select(0, chosen)
        self._hidden = None
        return logits[0]

    @cached_property
    def linear_head(self) -> nn.Linear | None:
        """The output layer, if its outputs are the logits; None: a model does more to them."""
        if not isinstance(self._head, nn.Linear):
            return None
        self.routes.expect(None)
        tokens = self._few_tokens
        with torch.no_grad():
            found = self.at_head(tokens[None], tokens, self._head.forward)
            return self._head if torch.equal(found, self.logits(tokens[None], tokens)) else None

    @property
    def _few_tokens(self) -> Tensor:
        """i64[k], to ask the model with; also where they stand.

        More than one: padding may be embedded as zeros, of which every function makes zeros.
        """
        return torch.arange(min(8, self.vocabulary_size), device=self.device)

    @property
    def attention_tokens(self) -> float:
        """So many tokens to attend to cost as much as all else that is computed for a token.

        A block has about 12 H^2 weights, and a token that is attended to costs 2 H products.
        """
        return 6.0 * cast("Any", self.module).config.get_text_config().hidden_size

    @cached_property
    def length_bound(self) -> float:
        """Tokens up to which a row is what it is alone, unless another one of its pass has more.

        With longrope transformers takes other frequencies then, for all rows of the pass.
        """
        return min(length_bounds(cast("Any", self.module).config.get_text_config()), default=inf)

    @cached_property
    def takes_branches(self) -> bool:
        """Whether tokens that rows have in common can be computed once.

        Of a model whose layers all attend to everything before, by config, and which on a few
        tokens then says the same as of each row alone. Weights that are shared out over ranks
        are asked by all of them together.
        """
        why = self._no_branches()
        if why:
            log.info("rows share no prefixes", why=why)
        return not why

    def _no_branches(self) -> str:
        """Return why `takes_branches` is false, or nothing."""
        from astraflow.engines.embedded.model import read_architecture  # noqa: PLC0415 - loads the engine

        config: Any = getattr(self.module, "config", None)
        if getattr(config, "_attn_implementation", None) not in ("sdpa", packed_rows.NAME):
            return "the model's attention takes no mask of its own"
        try:
            architecture = read_architecture(config)
        except (AstraflowError, AttributeError) as error:
            return str(error)
        if architecture.window is not None:
            return "layers attend to a sliding window"
        row, other = _ASKED
        positions = torch.tensor([[0, 1, 2, 3, 4, 3, 4]], device=self.device)
        right, wrong = (
            Branches(positions=positions, ends=torch.tensor([ends], device=self.device))
            for ends in ([7, 7, 7, 5, 5, 7, 7], [7] * 7)
        )
        return self._mixed((*row, *other[_SHARED:]), [3, 4, 5, 6], right, wrong)

    @cached_property
    def unpacked(self) -> str:
        """Why rows cannot follow each other as one, in which each sees itself alone; or nothing.

        They can where only attention mixes tokens, and takes another function. On a few tokens the
        model then says the same as of each row alone. Weights that are shared out over ranks are
        asked by all of them together.
        """
        config: Any = getattr(self.module, "config", None)
        given = getattr(config, "_attn_implementation", None)
        if given == packed_rows.NAME:
            return ""
        if given != "sdpa":
            return f"the model's attention is {given}, not sdpa"
        packed_rows.adopt(self.module)
        if config._attn_implementation != packed_rows.NAME:  # noqa: SLF001 - it is where it says it
            return "the model's attention is its own"
        row, other = _ASKED
        right, wrong = (PackedRows.of(np.array(lengths), self.device) for lengths in ([5, 5], [10]))
        why = self._mixed((*row, *other), range(10), right, wrong)
        if why:
            cast("Any", self.module).set_attn_implementation(given)
        return why

    def _mixed(
        self, tokens: Sequence[int], places: Sequence[int], right: Layout, wrong: Layout
    ) -> str:
        """Return why the model does not say of two rows laid out what it says of each alone.

        Args:
            tokens: Of both.
            places: Of the last tokens of each, as many of both, which they do not share.
            right: How they lie.
            wrong: Under which the second row sees the first one's end.
        """
        try:
            rounding, fault = self._gaps(tokens, places, right, wrong)
        except Exception as error:  # noqa: BLE001 - whatever a model raises that takes no masks
            return str(error).partition("\n")[0]
        # Also false where one of them is NaN.
        return "" if rounding < _ROUNDING * fault else "the model does not heed the mask"

    @torch.no_grad()
    def _gaps(
        self, tokens: Sequence[int], places: Sequence[int], *layouts: Layout
    ) -> tuple[float, ...]:
        """Return how far rows laid out in each way are from themselves alone, before the head.

        That of a critic says nothing at first.
        """
        self.routes.expect(None)
        size = self.vocabulary_size

        def states(ids: Sequence[int], at: Sequence[int], layout: Layout) -> Tensor:
            given, chosen = (to_tensor(np.array(each), self.device) for each in ([ids], at))
            return self.at_head(given % size, chosen, Tensor.float, layout=layout)

        last = range(5 - len(places) // 2, 5)
        wanted = torch.cat([states(each, last, None) for each in _ASKED])
        gaps = [states(tokens, places, each) - wanted for each in layouts]
        return tuple(float(each.square().sum().sqrt()) for each in gaps)

    def require_replay(self) -> None:
        """Refuse a model that could not replay experts; a pass shows it, where none was yet.

        Raises:
            AstraflowError: INVALID_FIELD that names the layer.
        """
        if not self.routes.is_known:
            self.routes.expect(None)
            tokens = self._few_tokens
            with torch.no_grad():
                self.logits(tokens[None], tokens)
        self.routes.require_choices()

    def at_head(
        self,
        tokens: Tensor,
        chosen: Tensor,
        read: Callable[[Tensor], Made],
        *,
        layout: Layout = None,
    ) -> Made:
        """Return what is made of the output layer's input at chosen positions.

        The layer itself runs at one of them. Weights that are shared out over ranks are whole while
        the model runs, so what needs those of the layer is made then.

        Args:
            tokens: i64[n, L], padded on the right with any token.
            chosen: i64[k], flat indices into `tokens`.
            read: Takes [k, H] in the model's dtype.
            layout: As `logits` takes it.
        """
        self._read = read
        try:
            self._run(tokens, chosen, layout)
            return self._made
        finally:
            self._read = self._made = self._hidden = None

    def _run(self, tokens: Tensor, chosen: Tensor, layout: Layout) -> Tensor:
        self._chosen, self._hidden = chosen, None
        seen: dict[str, Tensor] = {} if layout is None else {"position_ids": layout.positions}
        if isinstance(layout, Branches):
            seen["attention_mask"] = layout.mask
        for each in self.row_groups:
            seen |= each.model_inputs(tokens)
        try:
            with layout.masking() if isinstance(layout, PackedRows) else nullcontext():
                return cast("Any", self.module)(input_ids=tokens, use_cache=False, **seen).logits
        finally:
            self._chosen = None
            if not torch.is_grad_enabled() and hasattr(self.module, "reshard"):
                # Without a backward pass nobody else lets go of weights that were gathered.
                cast("Any", self.module).reshard()

    def _choose(self, _head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._chosen is None:
            return None
        states = cast("Tensor", args[0]).flatten(0, 1).index_select(0, self._chosen)
        self._hidden = states
        if self._read is None:
            return (states.unsqueeze(0), *args[1:])
        self._made = self._read(states)
        return (states[:1].unsqueeze(0), *args[1:])


def load_causal_model(
    directory: Path,
    *,
    device: str = "auto",
    is_empty: bool = False,
    makes_scores: bool = False,
) -> CausalModel:
    """Load a Hugging Face directory with weights in f32; nothing is downloaded or executed.

    Args:
        directory: Of the model.
        device: As a recipe names it.
        is_empty: Whether weights are not read, but come from elsewhere.
        makes_scores: Whether it is to be a reward model; one without a head for that gets one.

    Raises:
        AstraflowError: INVALID_FIELD as `load_module` has it.
    """
    module = load_module(directory, device=device, is_empty=is_empty, makes_scores=makes_scores)
    return CausalModel(module, never_sampled=never_sampled(directory))


def load_module(
    directory: Path, *, device: str = "auto", is_empty: bool = False, makes_scores: bool = False
) -> nn.Module:
    """Load the module of a Hugging Face directory, in f32; see `load_causal_model`.

    Raises:
        AstraflowError: INVALID_FIELD when it is no such directory, or this release of
            transformers does not know the architecture.
    """
    hide_progress_bars()
    try:
        read = empty_causal_model if is_empty else read_causal_model
        module = read(directory, dtype=torch.float32, makes_scores=makes_scores)
    except (OSError, ValueError) as error:
        what = "reward model" if makes_scores else "causal language model"
        raise AstraflowError(
            Reason.INVALID_FIELD, f"{directory} cannot be loaded as a {what}: {error}"
        ) from error
    for parameter in module.parameters():
        # Of a mapped file it lies where it happens to; products round by that.
        if parameter.data_ptr() % _LINE:
            parameter.data = parameter.data.clone()
    return use_onednn(module).to(device_of(device, key="device"))


_LINE: Final = 64
"""Bytes of a cache line, to which torch aligns what it allocates."""


def never_sampled(directory: Path) -> frozenset[int]:
    """Return what the embedded engine never draws of this model."""
    from astraflow.engines.tokenizer import find_tokenizer  # noqa: PLC0415 - loads the engine

    _, special = find_tokenizer(directory)
    return special.never_sampled


def hide_progress_bars() -> None:
    """Keep the bars of transformers out of the log; they write to stderr unasked."""
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415 - slow to import

    disable_progress_bar()


def prepare_torch(*, thread_count: int, deterministic: bool = True, fast_f32: bool = False) -> None:
    """Set this process up.

    Args:
        thread_count: CPU threads.
        deterministic: Whether the same step gives the same bits; where an operation has no
            deterministic kernel, a warning says so once.
        fast_f32: Whether products of f32 matrices may be TF32 on a GPU, of ten bits.
    """
    if deterministic:
        # cuBLAS reads it when it is first used (CUDA documentation, "Results reproducibility").
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(thread_count)
    # The other way to say it, torch.use_deterministic_algorithms, imports a compiler: 2 s.
    torch.set_deterministic_debug_mode("warn" if deterministic else "default")
    torch.backends.cuda.matmul.allow_tf32 = fast_f32


# In what torch's CPU allocator raises, a plain RuntimeError.
_SIGNS: Final = ("can't allocate memory", "not enough memory")


@contextmanager
def naming_exhaustion(*, max_tokens: int) -> Generator[None]:
    """Say what to do, with the recipe's `max_tokens` of a pass, when a block runs out of memory.

    Raises:
        AstraflowError: MEMORY_EXCEEDED.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_named = any(sign in str(error) for sign in _SIGNS)
        if not (is_named or isinstance(error, MemoryError | torch.OutOfMemoryError)):
            raise
        is_gpu = isinstance(error, torch.OutOfMemoryError)
        again = ", or set trainer.fsdp.checkpointing: true" if is_gpu else ""
        raise AstraflowError(
            Reason.MEMORY_EXCEEDED,
            f"a step ran out of memory: {error}; lower trainer.max_tokens_per_pass, now "
            f"{max_tokens}{again}",
        ) from error
