"""Proofs: who asks over a lane shows that he knows the secret of the run, without sending it.

A lane may end at a port where somebody else listens: he learns nothing.
"""

import secrets
from collections.abc import Sequence
from typing import Final

from blake3 import blake3

_CONTEXT: Final = "astraflow weights v1: proofs of the transfer secret on lanes"
_NONCE_NBYTES: Final = 32
PROOF_NBYTES: Final = 64
"""A nonce and the BLAKE3 of nonce and message, keyed with what is derived from the secret."""


def prove(secret: bytes, message: bytes = b"") -> bytes:
    """Return a proof, 64 bytes, that the maker of a message knows a secret."""
    nonce = secrets.token_bytes(_NONCE_NBYTES)
    return nonce + _mac(secret, nonce + message)


def is_proven(proof: bytes, message: bytes, known: Sequence[bytes]) -> bool:
    """Whether a proof was made with one of the secrets; an empty secret proves nothing."""
    if len(proof) != PROOF_NBYTES:
        return False
    nonce, given = proof[:_NONCE_NBYTES], proof[_NONCE_NBYTES:]
    macs = [_mac(secret, nonce + message) for secret in known if secret]
    # No early exit: every comparison is made.
    return bool(sum(secrets.compare_digest(given, mac) for mac in macs))


def _mac(secret: bytes, message: bytes) -> bytes:
    key = blake3(secret, derive_key_context=_CONTEXT).digest()
    return blake3(message, key=key).digest()
