"""astraflow.weights.v1, signatures: a stored patch proves who registered it, without the hub.

Root and base make a patch's bytes and what they lead to, so that the name of a patch is what is
signed. The key is of one policy of one run, made from the operator's token by the hub, which gives
the seed to the trainers of the policy.
"""

import struct
from dataclasses import replace
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import PatchInfo, VersionInfo
from astraflow.wire.weights import PROFILES

_STATEMENT: Final = b"astraflow patch v1"


class PatchSigner:
    """Signs the patches of one policy."""

    def __init__(self, seed: bytes) -> None:
        """Make the key of a seed: 32 bytes, a secret."""
        try:
            self._key = Ed25519PrivateKey.from_private_bytes(seed)
        except ValueError as error:
            raise AstraflowError(Reason.INVALID_FIELD, f"signing_seed: {error}") from error
        self.public_key = self._key.public_key().public_bytes_raw()

    def signed(self, patch: PatchInfo, layout_digest: bytes) -> PatchInfo:
        """Return a patch of a layout with its signature."""
        return replace(patch, signature=self._key.sign(_statement(patch, layout_digest)))


def require_signed(version: VersionInfo, patch: PatchInfo) -> None:
    """Check that the key of a version, if it has one, signed a patch to it; about 0.1 ms.

    Raises:
        AstraflowError: SIGNATURE_INVALID.
    """
    if not version.signing_key:
        return
    try:
        key = Ed25519PublicKey.from_public_bytes(version.signing_key)
        key.verify(patch.signature, _statement(patch, version.layout_digest))
    except (InvalidSignature, ValueError):
        what = "is signed by somebody else" if patch.signature else "is not signed"
        raise AstraflowError(
            Reason.SIGNATURE_INVALID,
            f"the patch to version {patch.version} of {version.policy_id} {what}: no trainer of"
            " the run registered it",
        ) from None


def _statement(patch: PatchInfo, layout_digest: bytes) -> bytes:
    numbers = struct.pack(
        "<8q",
        -1 if patch.base_version is None else patch.base_version,
        patch.version,
        PROFILES.encode(patch.profile),
        patch.codec_version,
        patch.chunk_count,
        patch.payload_nbytes,
        patch.shard_rank,
        patch.shard_count,
    )
    return _STATEMENT + layout_digest + patch.root_digest + numbers
