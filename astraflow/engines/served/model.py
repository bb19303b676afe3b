"""What is known of a model before a server runs it: read from its directory, without torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from astraflow.config.model_dirs import read_config
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, WeightUpdate
from astraflow.engines.checks import apply_failed, check_part, max_context_of
from astraflow.engines.served.routed_experts import ExpertLayout
from astraflow.engines.tokenizer import FastTokenizer, SpecialIds, find_tokenizer

_EXPONENTS = {
    Dtype.F16: np.uint16(0x7C00),
    Dtype.BF16: np.uint16(0x7F80),
    Dtype.F32: np.uint32(0x7F800000),
    Dtype.F64: np.uint64(0x7FF0000000000000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A model's limits.

    Attributes:
        vocab_size: Ids that it knows.
        max_context: Tokens of prompt and completion together.
        special: Ids that end, begin or pad.
        tokenizer: None: no text is read, so no stop strings.
        shapes: Of the tensors of the checkpoint, the tied head left out; empty: not known.
        experts: How it chooses them; None: it is dense.
    """

    directory: Path
    vocab_size: int
    max_context: int
    special: SpecialIds
    tokenizer: FastTokenizer | None
    shapes: Mapping[str, tuple[int, ...]]
    experts: ExpertLayout | None = None

    @classmethod
    def read(cls, directory: Path, max_context: int | None) -> "ModelDescription":
        """Read a Hugging Face directory.

        Raises:
            AstraflowError: INVALID_FIELD.
        """
        fields = _text_config(directory)
        tokenizer, special = find_tokenizer(directory)
        return cls(
            directory=directory,
            vocab_size=fields["vocab_size"],
            max_context=max_context_of(max_context, fields["max_position_embeddings"]),
            special=special.below(fields["vocab_size"]),
            tokenizer=tokenizer,
            shapes=_shapes(directory, is_tied=bool(fields.get("tie_word_embeddings"))),
            experts=ExpertLayout.of(fields),
        )

    def require_served(self, directory: Path, max_context: int | None) -> None:
        """Reject a server of another model than this one, as far as can be seen from here.

        Raises:
            AstraflowError: INVALID_FIELD naming a tensor that differs.
        """
        if max_context is not None and max_context < self.max_context:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"the server takes {max_context} tokens of context, engine.max_context is"
                f" {self.max_context}",
            )
        other = ModelDescription.read(directory, None).shapes if directory.is_dir() else self.shapes
        names = self.shapes.keys() | other.keys()
        differing = [name for name in names if self.shapes.get(name) != other.get(name)]
        if self.shapes and other and differing:
            name = min(differing)
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"the server serves {directory}, where {name} has shape {other.get(name)}; in"
                f" {self.directory} it has {self.shapes.get(name)}: attach to one of this model",
            )

    def check(self, update: WeightUpdate, live: int | None) -> None:
        """Reject an update before anything of it reaches a server.

        Raises:
            AstraflowError: APPLY_FAILED naming the tensor or the version.
        """
        if update.base_version is not None and live not in (update.base_version, update.version):
            raise apply_failed(
                f"version {update.version} changes {update.base_version}, not {live}"
            )
        seen: set[str] = set()
        for part in update.tensors:
            name = part.spec.name
            if self.shapes and name not in self.shapes:
                raise apply_failed(f"the model has no tensor {name}")
            if name in seen:
                raise apply_failed(f"{name} comes twice")
            seen.add(name)
            check_part(part, self.shapes.get(name, part.spec.shape))
            # An exponent that is all ones: a server keeps what it computes of that.
            mask = _EXPONENTS[part.spec.dtype]
            if ((part.values & mask) == mask).any():
                raise apply_failed(f"{name} has values that are not finite")
            if part.indices is not None and update.base_version is None:
                raise apply_failed(f"{name} is sparse, and there is no base to change")
        missing = self.shapes.keys() - seen
        if update.base_version is None and missing:
            raise apply_failed(f"{min(missing)} is missing, with {len(missing) - 1} others")


def _text_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise AstraflowError(
            Reason.INVALID_FIELD, f"{path} does not exist; give a Hugging Face model directory"
        )
    fields = read_config(directory)
    for needed in ("vocab_size", "max_position_embeddings"):
        if needed not in fields:
            raise AstraflowError(Reason.INVALID_FIELD, f"{path} has no {needed}")
    return fields


def _shapes(directory: Path, *, is_tied: bool) -> Mapping[str, tuple[int, ...]]:
    """Read the headers of the safetensors files: a length of 8 bytes, then JSON."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        shapes |= {name: tuple(said["shape"]) for name, said in header.items()}
    if is_tied:
        shapes.pop("lm_head.weight", None)
    return shapes
