"""Bodies in protobuf: sequences to train on, and what is answered about them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import FinishReason
from astraflow.engines.protocol import Generation, Likeliest
from astraflow_proto.tinker.v1 import tinker_pb2 as pb

# Of all tensors of a request, written out: a few bytes of a sparse one could ask for any room.
_MAX_ELEMENTS: Final = 1 << 26
_FLOATS: Final = frozenset({pb.ELEMENT_TYPE_F32, pb.ELEMENT_TYPE_BF16})
_NUMPY: Final[Mapping[int, np.dtype[Any]]] = {
    pb.ELEMENT_TYPE_F32: np.dtype("<f4"),
    pb.ELEMENT_TYPE_I64: np.dtype("<i8"),
    pb.ELEMENT_TYPE_I32: np.dtype("<i4"),
    pb.ELEMENT_TYPE_BF16: np.dtype("<u2"),
}
# Says that there is none so likely.
_NOTHING: Final = (0, -99999.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Datum:
    """One sequence.

    Attributes:
        tokens: i64[L], at least one.
        inputs: Of the loss, by name: f32 or i64, [L] or [L, K].
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainRequest:
    """What `forward_backward` is asked for.

    Attributes:
        forward_only: Whether gradients are left as they are.
    """

    data: Sequence[Datum]
    loss_fn: str
    settings: Mapping[str, float]
    forward_only: bool


def read_request(body: bytes) -> pb.ForwardBackwardRequest:
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise _invalid("the body is no ForwardBackwardRequest in protobuf") from error


def parse_request(message: pb.ForwardBackwardRequest) -> TrainRequest:
    """Return what a message asks for; INVALID_FIELD names the datum and what is wrong with it."""
    if not message.data:
        raise _invalid("data: give at least one datum")
    shapes = [each.shape for datum in message.data for each in datum.loss_fn_inputs.values()]
    if any(size < 0 for shape in shapes for size in shape):
        raise _invalid("loss_fn_inputs: a shape has a negative size")
    if sum(map(prod, shapes)) > _MAX_ELEMENTS:
        raise _invalid(f"loss_fn_inputs: more than {_MAX_ELEMENTS} elements; send fewer datums")
    texts = [name for name, each in message.loss_settings.items() if not each.HasField("number")]
    data = [_datum(each, f"data[{index}]") for index, each in enumerate(message.data)]
    if texts:
        raise _invalid(f"loss_fn_config.{min(texts)} is no number")
    settings = {name: each.number for name, each in message.loss_settings.items()}
    return TrainRequest(
        data=data,
        loss_fn=message.loss_fn,
        settings=settings or dict(message.plain_loss_settings),
        forward_only=message.forward_only,
    )


def _datum(message: pb.Datum, name: str) -> Datum:
    chunks = [_tokens(each, f"{name}.model_input") for each in message.model_input]
    tokens = np.concatenate(chunks) if chunks else np.zeros(0, np.int64)
    if not len(tokens):
        raise _invalid(f"{name}.model_input has no tokens")
    inputs = {
        key: _array(each, f"{name}.loss_fn_inputs.{key}")
        for key, each in message.loss_fn_inputs.items()
    }
    for key, array in inputs.items():
        if array.ndim not in (1, 2) or len(array) != len(tokens):
            raise _invalid(
                f"{name}.loss_fn_inputs.{key} has shape {list(array.shape)}: give one value, or "
                f"one row of values, for each of the {len(tokens)} tokens of model_input"
            )
    return Datum(tokens=tokens, inputs=inputs)


def _tokens(chunk: pb.Chunk, name: str) -> np.ndarray:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise unserved(f"{name}: a chunk of {kind or 'an unknown kind'}", "give encoded_text")
    return _elements(chunk.encoded_text.tokens, np.dtype("<i4"), name).astype(np.int64)


def _array(message: pb.Tensor, name: str) -> np.ndarray:
    dtype = _NUMPY.get(message.element_type)
    if dtype is None:
        raise _invalid(f"{name} has element type {message.element_type}, which is none")
    shape = tuple(message.shape)
    if message.WhichOneof("layout") == "sparse_rows":
        values = _sparse(message.sparse_rows, dtype, shape, name)
    else:
        values = _elements(message.dense, dtype, name)
        if shape and prod(shape) != len(values):
            raise _invalid(f"{name} has shape {list(shape)} and {len(values)} values")
        values = values.reshape(shape or (-1,))
    if message.element_type == pb.ELEMENT_TYPE_BF16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32 if message.element_type in _FLOATS else np.int64)


def _sparse(
    message: pb.SparseRows, dtype: np.dtype[Any], shape: tuple[int, ...], name: str
) -> np.ndarray:
    """Return a matrix written out; what it does not list is 0."""
    values = _elements(message.values, dtype, name)
    offsets = _elements(message.row_offsets, np.dtype("<i8"), name)
    columns = _elements(message.columns, np.dtype("<i8"), name)
    is_sound = (
        len(shape) == 2
        and len(offsets) == shape[0] + 1
        and not offsets[0]
        and offsets[-1] == len(values) == len(columns)
        and bool((np.diff(offsets) >= 0).all())
        and bool(((columns >= 0) & (columns < shape[1])).all())
    )
    if not is_sound:
        raise _invalid(f"{name} is no matrix of shape {list(shape)} in compressed sparse rows")
    full = np.zeros(shape, dtype)
    full[np.repeat(np.arange(shape[0]), np.diff(offsets)), columns] = values
    return full


def _elements(data: bytes, dtype: np.dtype[Any], name: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise _invalid(f"{name} has {len(data)} bytes, no multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def train_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Return a `ForwardBackwardOutput`.

    Args:
        logprobs: Of each datum, f32[L] or f32[L, K].
        metrics: By name:reduction, as clients put the chunks of a batch together.
    """
    records: list[pb.ArrayRecord] = []
    # Stretches of arrays that are as wide as each other.
    for shape, group in groupby(logprobs, key=lambda array: array.shape[1:]):
        arrays = list(group)
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8")
        tensor = pb.BatchedTensor(
            data=b"".join(array.astype("<f4").tobytes() for array in arrays),
            offsets=offsets.tobytes(),
            element_type=pb.ELEMENT_TYPE_F32,
            trailing_shape=shape,
        )
        records.append(
            pb.ArrayRecord(
                type_tag="ArrayRecord", fields={"logprobs": tensor}, num_datums=len(arrays)
            )
        )
    return pb.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=records, metrics=metrics
    ).SerializeToString()


def sample_output(
    generations: Sequence[Generation],
    *,
    likeliest_count: int = 0,
    prompt_logprobs: np.ndarray | None = None,
    prompt_likeliest: Sequence[Likeliest] = (),
) -> bytes:
    """Return a `SampleResponse`; prompt_logprobs are f32[prompt], NaN where there is none."""
    answer = pb.SampleResponse(
        sequences=[_sequence(each, likeliest_count) for each in generations],
        prompt_logprobs=None
        if prompt_logprobs is None
        else prompt_logprobs.astype("<f4").tobytes(),
    )
    if prompt_likeliest:
        answer.likeliest_prompt_tokens.CopyFrom(_likeliest(prompt_likeliest))
    return answer.SerializeToString()


def _sequence(one: Generation, likeliest_count: int) -> pb.SampledSequence:
    sequence = pb.SampledSequence(
        stop_reason=0 if one.finish_reason is FinishReason.STOP else 1,
        tokens=one.tokens.astype("<i4").tobytes(),
        logprobs=one.logprobs.astype("<f4").tobytes(),
    )
    if likeliest_count and len(one.tokens):
        sequence.likeliest_tokens.CopyFrom(_likeliest(one.likeliest))
    return sequence


def _likeliest(places: Sequence[Likeliest]) -> pb.Likeliest:
    k = max(len(place) for place in places)
    pairs = [pair for place in places for pair in [*place, *[_NOTHING] * (k - len(place))]]
    return pb.Likeliest(
        token_ids=np.array([token for token, _ in pairs], "<i4").tobytes(),
        logprobs=np.array([logprob for _, logprob in pairs], "<f4").tobytes(),
        k=k,
        length=len(places),
    )


def unserved(what: str, hint: str) -> AstraflowError:
    """Return that a request asks for what is not served."""
    return AstraflowError(Reason.CAPABILITY_MISSING, f"{what} is not served here; {hint}")


def _invalid(message: str) -> AstraflowError:
    return AstraflowError(Reason.INVALID_FIELD, message)
