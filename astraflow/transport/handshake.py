"""The handshake of a lane: both ends prove the secret, and agree on keys, before anything is sent.

    source -> puller   GREETING, 64 bytes   what the source draws for this connection alone
    puller -> source   HELLO, 64 bytes      what the puller draws, and a proof over both
    source -> puller   WELCOME, 32 bytes    the source's proof

Proofs are over all that came before and the lane's name, keyed with what is derived from the secret
of the run. So none holds for another connection, lane or run, and none can be sent again.
docs/lanes.md has the bytes; ADR 17 says why they are so.
"""

import secrets
import struct
from collections.abc import Sequence
from typing import Final

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import LaneKind
from astraflow.transport.frames import PROOF_NBYTES, bad_frame, source_lost

GREETING_NBYTES: Final = 64
HELLO_NBYTES: Final = 64
WELCOME_NBYTES: Final = 32
GROUP_NBYTES: Final = 16
"""Of the name that a puller gives to connections which belong together."""

TAG_NBYTES: Final = 16

_MAGIC: Final = b"AFL2"
_GREETING: Final = struct.Struct("<4s?27s32s")
_HELLO: Final = struct.Struct("<16s32s16s")
_CONTEXT: Final = "astraflow weights v2: handshakes of lanes"
_KEYS: Final = b"astraflow weights v2: keys of a connection"
_HELLO_PROOF_NBYTES: Final = 16


class Channel:
    """What both ends of one connection share after their handshake.

    Where it is sealed, headers and bodies are AES-256-GCM records: each direction has its own key,
    and counts them.
    """

    def __init__(self, transcript: bytes, keys: tuple[bytes, bytes] | None) -> None:
        self._transcript = transcript
        self._seal = self._open = None
        if keys is not None:
            self._seal, self._open = map(AESGCM, keys)
        self._sealed_count = self._opened_count = self._request_count = 0

    def record_nbytes(self, nbytes: int) -> int:
        """Return what so many bytes have on the wire; none have none."""
        return nbytes + TAG_NBYTES if nbytes and self._seal is not None else nbytes

    def sealed(self, frame: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
        """Return header and body of a frame as records; what is empty has none."""
        if self._seal is None:
            return [*frame]
        records: list[bytes | memoryview] = []
        for part in filter(len, frame):
            self._sealed_count += 1
            nonce = self._sealed_count.to_bytes(12, "little")
            records.append(self._seal.encrypt(nonce, part, None))
        return records

    def opened(self, record: bytes) -> bytes:
        if self._open is None or not record:
            return record
        content = bytearray(len(record) - TAG_NBYTES)
        self.open_into(memoryview(record), memoryview(content))
        return bytes(content)

    def open_into(self, record: memoryview, place: memoryview) -> None:
        """Write what a record has to its place; a place that fails means nothing."""
        if self._open is None:
            place[:] = record
            return
        try:
            nonce = (self._opened_count + 1).to_bytes(12, "little")
            self._open.decrypt_into(nonce, record, None, place)
        except InvalidTag:
            raise source_lost("a record of the lane was changed on its way") from None
        # Not counted before it was opened: after one that fails no other is opened either.
        self._opened_count += 1

    def prove(self, secret: bytes, message: bytes) -> bytes:
        return _mac(secret, self._next_request() + message, PROOF_NBYTES)

    def is_proven(self, known: Sequence[bytes], proof: bytes, message: bytes) -> bool:
        """Whether the next request was made with a secret; an empty one proves nothing."""
        request = self._next_request() + message
        macs = [_mac(secret, request, PROOF_NBYTES) for secret in known if secret]
        # No early exit: every comparison is made.
        return bool(sum(secrets.compare_digest(proof, mac) for mac in macs))

    def _next_request(self) -> bytes:
        self._request_count += 1
        return b"request" + self._transcript + self._request_count.to_bytes(8, "little")


class SourceHandshake:
    """The source's end of one connection.

    Attributes:
        greeting: What is sent first.
    """

    def __init__(self, lane: LaneKind, *, seals: bool) -> None:
        self._lane = lane
        self._key, public = _drawn(seals=seals)
        self.greeting = _GREETING.pack(_MAGIC, seals, secrets.token_bytes(27), public)

    def is_proven(self, hello: bytes, secret: bytes) -> bool:
        """Whether a puller's answer to this greeting was made with a secret; an empty one: no."""
        given = hello[-_HELLO_PROOF_NBYTES:]
        proof = _hello_proof(secret, self._lane, self.greeting, hello[:-_HELLO_PROOF_NBYTES])
        return bool(secret) and secrets.compare_digest(given, proof)

    def welcome(self, hello: bytes, secret: bytes) -> tuple[bytes, Channel]:
        _, public, _ = _HELLO.unpack(hello)
        transcript = _transcript(self._lane, self.greeting, hello)
        keys = _keys(self._key, public, secret, transcript)
        channel = Channel(transcript, None if keys is None else (keys[1], keys[0]))
        return _mac(secret, b"source" + transcript, WELCOME_NBYTES), channel


class PullerHandshake:
    """The puller's end of one connection."""

    def __init__(self, lane: LaneKind, group: bytes, secret: bytes, *, must_seal: bool) -> None:
        self._lane = lane
        self._group = group
        self._secret = secret
        self._must_seal = must_seal
        self._transcript = b""
        self._keys: tuple[bytes, bytes] | None = None

    def hello(self, greeting: bytes) -> bytes:
        magic, seals, _, public = _GREETING.unpack(greeting)
        if magic != _MAGIC:
            raise bad_frame("it does not begin as lanes of this release do")
        if self._must_seal and not seals:
            raise AstraflowError(
                Reason.LANE_UNAVAILABLE, "the source would send weights in the clear beside TLS"
            )
        key, drawn = _drawn(seals=seals)
        hello = self._group + drawn
        hello += _hello_proof(self._secret, self._lane, greeting, hello)
        self._transcript = _transcript(self._lane, greeting, hello)
        self._keys = _keys(key, public, self._secret, self._transcript)
        return hello

    def channel(self) -> Channel:
        """Return what follows the answer: requests may go before the source has proven itself."""
        return Channel(self._transcript, self._keys)

    def check(self, welcome: bytes) -> None:
        proof = _mac(self._secret, b"source" + self._transcript, WELCOME_NBYTES)
        if not secrets.compare_digest(proof, welcome):
            raise AstraflowError(
                Reason.SOURCE_UNREACHABLE,
                "who answers the lane does not know the secret of the run",
            )


def _drawn(*, seals: bool) -> tuple[X25519PrivateKey | None, bytes]:
    """Return an end's key for one connection and what it shows of it; in the clear a nonce."""
    key = X25519PrivateKey.generate() if seals else None
    return key, key.public_key().public_bytes_raw() if key else secrets.token_bytes(32)


def _keys(
    key: X25519PrivateKey | None, public: bytes, secret: bytes, transcript: bytes
) -> tuple[bytes, bytes] | None:
    """Return the keys of the puller and of the source; None: it is in the clear."""
    if key is None:
        return None
    try:
        shared = key.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise bad_frame("its key is none") from None
    derive = HKDF(algorithm=SHA256(), length=64, salt=transcript, info=_KEYS)
    both = derive.derive(shared + secret)
    return both[:32], both[32:]


def _hello_proof(secret: bytes, lane: LaneKind, greeting: bytes, hello: bytes) -> bytes:
    return _mac(secret, b"puller" + lane.value.encode() + greeting + hello, _HELLO_PROOF_NBYTES)


def _transcript(lane: LaneKind, greeting: bytes, hello: bytes) -> bytes:
    return blake3(lane.value.encode() + greeting + hello).digest()


def _mac(secret: bytes, message: bytes, nbytes: int) -> bytes:
    key = blake3(secret, derive_key_context=_CONTEXT).digest()
    return blake3(message, key=key).digest(nbytes)
