"""Damage: what a source, or the way from it, may do to the messages of a transfer.

A transfer is a list of `PullResponse` messages in wire bytes: the plan, then chunks. A damage
returns another list; an error in it is raised at that place. Each belongs to one class of faults.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from astraflow.core.errors import AstraflowError, Reason
from astraflow.wire.weights import decode_sent_chunk, digest_of, root_digest
from astraflow_proto.weights.v1.transfer_service_pb2 import PullResponse

Wires = list[bytes | AstraflowError]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What a source would truly send.

    Attributes:
        wires: The plan, then chunks.
        other: The same from another base, to another version, or of another training.
        rng: Decides.
    """

    wires: Sequence[bytes]
    other: Sequence[bytes]
    rng: Random

    @property
    def chunk_count(self) -> int:
        """Chunks that would be sent."""
        return len(self.wires) - 1

    def any_chunk(self) -> int:
        """Return the place of a chunk in the wires."""
        return self.rng.randrange(1, len(self.wires))

    def read(self, at: int) -> Any:
        """Return one message."""
        return PullResponse.FromString(self.wires[at])

    def having(self, at: int, message: Any) -> Wires:
        """Return the wires with another message at one place."""
        data = message if isinstance(message, bytes) else message.SerializeToString()
        return [*self.wires[:at], data, *self.wires[at + 1 :]]


Damage = Callable[[Transfer], Wires]

CLASSES: Final = (
    "bit_flip",
    "truncation",
    "reorder",
    "duplicate",
    "wrong_base",
    "header_damage",
)
DAMAGES: Final[dict[str, list[Damage]]] = {name: [] for name in CLASSES}


def _of(name: str) -> Callable[[Damage], Damage]:
    def register(damage: Damage) -> Damage:
        DAMAGES[name].append(damage)
        return damage

    return register


def cut() -> AstraflowError:
    """Return what a lane raises when a connection is cut."""
    return AstraflowError(Reason.SOURCE_UNREACHABLE, "cut by the harness", retryable=True)


# Bit flips.


@_of("bit_flip")
def flip_wire(transfer: Transfer) -> Wires:
    """Flip one bit of any message."""
    at = transfer.rng.randrange(len(transfer.wires))
    return transfer.having(at, flipped(transfer.rng, transfer.wires[at]))


@_of("bit_flip")
def flip_many(transfer: Transfer) -> Wires:
    """Flip two to nine bits, anywhere in the transfer."""
    wires: Wires = list(transfer.wires)
    for _ in range(transfer.rng.randrange(2, 10)):
        at = transfer.rng.randrange(len(wires))
        wires[at] = flipped(transfer.rng, wires[at])
    return wires


@_of("bit_flip")
def flip_payload(transfer: Transfer) -> Wires:
    """Flip one bit of a payload: the message stays sound."""
    at = _chunk_with_payload(transfer)
    message = transfer.read(at)
    message.chunk.payload = flipped(transfer.rng, message.chunk.payload)
    return transfer.having(at, message)


@_of("bit_flip")
def flip_plan(transfer: Transfer) -> Wires:
    """Flip one bit of the plan."""
    return transfer.having(0, flipped(transfer.rng, transfer.wires[0]))


@_of("bit_flip")
def flip_burst(transfer: Transfer) -> Wires:
    """Overwrite up to 64 bytes of a message in a row."""
    at = transfer.rng.randrange(len(transfer.wires))
    data = bytearray(transfer.wires[at])
    start = transfer.rng.randrange(len(data))
    part = data[start : start + 64]
    data[start : start + 64] = transfer.rng.randbytes(len(part))
    return transfer.having(at, bytes(data))


# Truncation.


@_of("truncation")
def end_early(transfer: Transfer) -> Wires:
    """End the stream, as if all had been sent."""
    return list(transfer.wires[: transfer.rng.randrange(len(transfer.wires))])


@_of("truncation")
def cut_between(transfer: Transfer) -> Wires:
    """Cut the connection between two messages."""
    return [*transfer.wires[: transfer.rng.randrange(len(transfer.wires))], cut()]


@_of("truncation")
def cut_wire(transfer: Transfer) -> Wires:
    """Send the first bytes of a message only."""
    at = transfer.rng.randrange(len(transfer.wires))
    data = transfer.wires[at]
    return transfer.having(at, data[: transfer.rng.randrange(len(data))])


@_of("truncation")
def cut_payload(transfer: Transfer) -> Wires:
    """Shorten a payload, and half of the time tell its new size."""
    at = _chunk_with_payload(transfer)
    message = transfer.read(at)
    payload = message.chunk.payload
    message.chunk.payload = payload[: transfer.rng.randrange(max(1, len(payload)))]
    if transfer.rng.random() < 0.5:
        message.chunk.header.payload_nbytes = len(message.chunk.payload)
    return transfer.having(at, message)


@_of("truncation")
def leave_one_out(transfer: Transfer) -> Wires:
    """Leave out one message."""
    at = transfer.rng.randrange(len(transfer.wires))
    return [*transfer.wires[:at], *transfer.wires[at + 1 :]]


@_of("truncation")
def shorten_plan(transfer: Transfer) -> Wires:
    """Leave out the last digests of the plan, or a whole patch of it."""
    message = transfer.read(0)
    patches = message.plan.patches
    if transfer.rng.random() < 0.3:
        del patches[transfer.rng.randrange(len(patches))]
        return transfer.having(0, message)
    patch = transfer.rng.choice(patches)
    del patch.chunk_digests[transfer.rng.randrange(len(patch.chunk_digests)) :]
    if transfer.rng.random() < 0.5:
        patch.patch.chunk_count = len(patch.chunk_digests)
    return transfer.having(0, message)


# Reordering.


@_of("reorder")
def shuffle_chunks(transfer: Transfer) -> Wires:
    """Send the chunks in any order."""
    chunks = list(transfer.wires[1:])
    transfer.rng.shuffle(chunks)
    return [transfer.wires[0], *chunks]


@_of("reorder")
def swap_chunks(transfer: Transfer) -> Wires:
    """Send two chunks in each other's place."""
    wires: Wires = list(transfer.wires)
    one, two = transfer.any_chunk(), transfer.any_chunk()
    wires[one], wires[two] = wires[two], wires[one]
    return wires


@_of("reorder")
def plan_late(transfer: Transfer) -> Wires:
    """Send the plan after some of its chunks."""
    at = transfer.any_chunk()
    return [*transfer.wires[1 : at + 1], transfer.wires[0], *transfer.wires[at + 1 :]]


@_of("reorder")
def swap_payloads(transfer: Transfer) -> Wires:
    """Send the payloads of two chunks under each other's header."""
    one, two = transfer.any_chunk(), transfer.any_chunk()
    first, second = transfer.read(one), transfer.read(two)
    first.chunk.payload, second.chunk.payload = second.chunk.payload, first.chunk.payload
    wires = transfer.having(one, first)
    wires[two] = second.SerializeToString() if one != two else wires[two]
    return wires


@_of("reorder")
def swap_places(transfer: Transfer) -> Wires:
    """Give two chunks each other's index, and half of the time range."""
    one, two = transfer.any_chunk(), transfer.any_chunk()
    first, second = transfer.read(one), transfer.read(two)
    names = ["index", "offset", "nbytes"] if transfer.rng.random() < 0.5 else ["index"]
    for name in names:
        ours, theirs = getattr(first.chunk.header, name), getattr(second.chunk.header, name)
        setattr(first.chunk.header, name, theirs)
        setattr(second.chunk.header, name, ours)
    wires = transfer.having(one, first)
    wires[two] = second.SerializeToString() if one != two else wires[two]
    return wires


@_of("reorder")
def swap_digests(transfer: Transfer) -> Wires:
    """Swap two digests of the plan, or two of its patches."""
    message = transfer.read(0)
    patches = message.plan.patches
    if len(patches) > 1 and transfer.rng.random() < 0.5:
        order = list(patches)
        transfer.rng.shuffle(order)
        del patches[:]
        patches.extend(order)
        return transfer.having(0, message)
    digests = transfer.rng.choice(patches).chunk_digests
    one, two = transfer.rng.randrange(len(digests)), transfer.rng.randrange(len(digests))
    digests[one], digests[two] = digests[two], digests[one]
    return transfer.having(0, message)


# Duplicates.


@_of("duplicate")
def send_twice(transfer: Transfer) -> Wires:
    """Send one message again, somewhere later."""
    at = transfer.rng.randrange(len(transfer.wires))
    again = transfer.rng.randrange(at, len(transfer.wires))
    wires: Wires = list(transfer.wires)
    wires.insert(again + 1, transfer.wires[at])
    return wires


@_of("duplicate")
def send_all_twice(transfer: Transfer) -> Wires:
    """Send every chunk twice: each at once, or all of them again."""
    if transfer.rng.random() < 0.5:
        return [transfer.wires[0], *(each for each in transfer.wires[1:] for _ in range(2))]
    half = transfer.rng.randrange(1, len(transfer.wires))
    return [*transfer.wires[:half], *transfer.wires[1:half], *transfer.wires[half:]]


@_of("duplicate")
def send_twice_spoiled(transfer: Transfer) -> Wires:
    """Send a chunk twice, one of them with other bytes."""
    at = _chunk_with_payload(transfer)
    message = transfer.read(at)
    message.chunk.payload = flipped(transfer.rng, message.chunk.payload)
    pair = [transfer.wires[at], message.SerializeToString()]
    transfer.rng.shuffle(pair)
    return [*transfer.wires[:at], *pair, *transfer.wires[at + 1 :]]


@_of("duplicate")
def send_as_another(transfer: Transfer) -> Wires:
    """Send a chunk again as another one, in whose place it comes."""
    one, two = transfer.any_chunk(), transfer.any_chunk()
    message = transfer.read(one)
    message.chunk.header.index = transfer.read(two).chunk.header.index
    return transfer.having(two, message)


@_of("duplicate")
def send_for_long(transfer: Transfer) -> Wires:
    """Send one chunk over and over."""
    at = transfer.any_chunk()
    return [*transfer.wires[:at], *[transfer.wires[at]] * 50, *transfer.wires[at + 1 :]]


@_of("duplicate")
def repeat_in_plan(transfer: Transfer) -> Wires:
    """Name a patch, or a digest, twice in the plan."""
    message = transfer.read(0)
    patch = transfer.rng.choice(message.plan.patches)
    if transfer.rng.random() < 0.5:
        message.plan.patches.append(patch)
    else:
        patch.chunk_digests.append(transfer.rng.choice(patch.chunk_digests))
        patch.patch.chunk_count += transfer.rng.randrange(2)
    return transfer.having(0, message)


# Wrong bases.


@_of("wrong_base")
def send_other(transfer: Transfer) -> Wires:
    """Send another way, or to another version, in full."""
    return list(transfer.other)


@_of("wrong_base")
def other_chunks(transfer: Transfer) -> Wires:
    """Send the right plan, and chunks of another base."""
    return [transfer.wires[0], *transfer.other[1:]]


@_of("wrong_base")
def other_plan(transfer: Transfer) -> Wires:
    """Send the plan of another base, and the right chunks."""
    return [transfer.other[0], *transfer.wires[1:]]


@_of("wrong_base")
def other_chunk(transfer: Transfer) -> Wires:
    """Send one chunk as it would be over another base."""
    at = transfer.any_chunk()
    there = 1 + (at - 1) % max(1, len(transfer.other) - 1)
    message = PullResponse.FromString(transfer.other[min(there, len(transfer.other) - 1)])
    if message.WhichOneof("item") == "chunk":
        message.chunk.header.index = transfer.read(at).chunk.header.index
    return transfer.having(at, message)


@_of("wrong_base")
def other_as_ours(transfer: Transfer) -> Wires:
    """Send the chunks of another base, with their digests, under the name of the right patch."""
    ours, theirs = transfer.read(0), PullResponse.FromString(transfer.other[0])
    for mine, foreign in zip(ours.plan.patches, theirs.plan.patches, strict=False):
        foreign.patch.base_version = mine.patch.base_version
        foreign.patch.version = mine.patch.version
        foreign.patch.root_digest = mine.patch.root_digest
        foreign.patch.payload_nbytes = mine.patch.payload_nbytes
    return [theirs.SerializeToString(), *transfer.other[1:]]


@_of("wrong_base")
def rename_base(transfer: Transfer) -> Wires:
    """Say that a patch of the plan starts from another version."""
    message = transfer.read(0)
    patch = transfer.rng.choice(message.plan.patches).patch
    if transfer.rng.random() < 0.3:
        patch.ClearField("base_version")
    else:
        patch.base_version = max(0, patch.base_version + transfer.rng.choice([-2, -1, 1]))
    return transfer.having(0, message)


# Damaged headers.


@_of("header_damage")
def spoil_header(transfer: Transfer) -> Wires:
    """Set a field of a chunk's header to what it is not."""
    at = transfer.any_chunk()
    message = transfer.read(at)
    set_any(transfer.rng, message.chunk.header)
    return transfer.having(at, message)


@_of("header_damage")
def spoil_many(transfer: Transfer) -> Wires:
    """Set some fields of every header."""
    wires: Wires = [transfer.wires[0]]
    for at in range(1, len(transfer.wires)):
        message = transfer.read(at)
        set_any(transfer.rng, message.chunk.header)
        wires.append(message.SerializeToString())
    return wires


@_of("header_damage")
def spoil_patch_index(transfer: Transfer) -> Wires:
    """Say that a chunk is of another patch."""
    at = transfer.any_chunk()
    message = transfer.read(at)
    patch_index = message.chunk.patch_index
    message.chunk.patch_index = transfer.rng.choice(
        [patch_index + 1, patch_index - 1, patch_index + 7, (1 << 31) - 1]
    )
    return transfer.having(at, message)


@_of("header_damage")
def spoil_plan(transfer: Transfer) -> Wires:
    """Set a field of the plan, or of one of its patches."""
    message = transfer.read(0)
    index = transfer.rng.choice(message.plan.patches)
    set_any(transfer.rng, transfer.rng.choice([message.plan, index, index.patch]))
    return transfer.having(0, message)


@_of("header_damage")
def lie_consistently(transfer: Transfer) -> Wires:
    """Change a header and the digest of its chunk, and half of the time the root."""
    at = transfer.any_chunk()
    plan, message = transfer.read(0), transfer.read(at)
    set_any(transfer.rng, message.chunk.header)
    patches = plan.plan.patches
    patch = patches[message.chunk.patch_index]
    try:
        sent = decode_sent_chunk(message.chunk)
        patch.chunk_digests[transfer.read(at).chunk.header.index] = digest_of(sent.chunk)
    except AstraflowError:
        return transfer.having(at, message)
    if transfer.rng.random() < 0.5:
        patch.patch.root_digest = root_digest(patch.chunk_digests, patch.shared_tables)
    wires = transfer.having(at, message)
    wires[0] = plan.SerializeToString()
    return wires


@_of("header_damage")
def spoil_header_wire(transfer: Transfer) -> Wires:
    """Overwrite one of the first 40 bytes of a chunk's message, where its header lies."""
    at = transfer.any_chunk()
    data = bytearray(transfer.wires[at])
    data[transfer.rng.randrange(min(40, len(data)))] ^= transfer.rng.randrange(1, 256)
    return transfer.having(at, bytes(data))


def flipped(rng: Random, data: bytes | AstraflowError) -> bytes:
    """Return bytes with one bit flipped; one random byte for no bytes."""
    assert isinstance(data, bytes)
    if not data:
        return rng.randbytes(1)
    spoiled = bytearray(data)
    spoiled[rng.randrange(len(spoiled))] ^= 1 << rng.randrange(8)
    return bytes(spoiled)


def set_any(rng: Random, message: Any) -> None:
    """Set one field of a message that holds a number or bytes to another value."""
    fields = [
        each
        for each in message.DESCRIPTOR.fields
        if not each.is_repeated and each.type != each.TYPE_MESSAGE
    ]
    field = rng.choice(fields)
    old = getattr(message, field.name)
    setattr(message, field.name, _other_value(rng, field, old))


def _other_value(rng: Random, field: Any, old: Any) -> Any:
    if isinstance(old, bytes):
        return rng.choice([b"", flipped(rng, old), old + b"\0", rng.randbytes(32)])
    if isinstance(old, str):
        return old + "x"
    if field.type == field.TYPE_ENUM:
        return rng.choice([each for each in (0, 1, 2, 3, 4, 5, 17, 99) if each != old])
    limit = (1 << 31) - 1 if field.type == field.TYPE_INT32 else (1 << 63) - 1
    values = [0, -1, old - 1, old + 1, 2 * old, 1 << 20, 1 << 30, limit, -limit - 1]
    values += [rng.randrange(1 << 16), old ^ (1 << rng.randrange(24)), old + 64, 4 << 20]
    return rng.choice([each for each in values if each != old and -limit - 1 <= each <= limit])


def _chunk_with_payload(transfer: Transfer) -> int:
    """Return the place of a chunk that has bytes; of any where none has."""
    places = list(range(1, len(transfer.wires)))
    transfer.rng.shuffle(places)
    full = (at for at in places if transfer.read(at).chunk.payload)
    return next(full, places[0])
