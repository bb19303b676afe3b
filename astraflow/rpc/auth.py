"""Who calls: secrets in the metadata of a call."""

import hmac
from typing import Any, Final, TypeAlias

import grpc.aio

from astraflow.core.errors import AstraflowError, Reason

MetadataPairs: TypeAlias = tuple[tuple[str, str | bytes], ...]

BEARER_KEY: Final = "authorization"
"""Join and operator tokens: `Bearer ...`."""
SESSION_KEY: Final = "astraflow-session-bin"
"""Session.token."""
TRANSFER_KEY: Final = "astraflow-transfer-bin"
"""Session.transfer_token."""

_SCHEME: Final = "bearer "


Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""A call, as servicers have it."""


def bearer(token: str) -> MetadataPairs:
    """Return the metadata of a call with a join or operator token."""
    return ((BEARER_KEY, f"Bearer {token}"),)


def session_metadata(token: bytes) -> MetadataPairs:
    """Return the metadata of a member's call."""
    return ((SESSION_KEY, token),)


def transfer_metadata(token: bytes) -> MetadataPairs:
    """Return the metadata of a call to a TransferService."""
    return ((TRANSFER_KEY, token),)


def bearer_of(context: Context) -> str:
    """Return the caller's bearer token; empty without one."""
    value = _value(context, BEARER_KEY)
    if not isinstance(value, str) or not value.lower().startswith(_SCHEME):
        return ""
    return value[len(_SCHEME) :].strip()


def secret_of(context: Context, key: str) -> bytes:
    """Return the caller's binary secret under a key; empty without one."""
    value = _value(context, key)
    return value if isinstance(value, bytes) else b""


def is_same_secret(given: str | bytes, expected: str | bytes) -> bool:
    """Whether two secrets are equal, in time that does not tell where they differ.

    An empty secret equals nothing.
    """
    return bool(expected) and hmac.compare_digest(_bytes(given), _bytes(expected))


def has_secret(context: Context, key: str, *expected: bytes) -> bool:
    """Whether a call carries one of the expected secrets."""
    given = secret_of(context, key)
    # No early exit: every comparison is made.
    return bool(sum(is_same_secret(given, each) for each in expected))


def require_secret(context: Context, key: str, *expected: bytes) -> None:
    """Let a call pass that carries one of the expected secrets.

    Raises:
        AstraflowError: TOKEN_INVALID.
    """
    if not has_secret(context, key, *expected):
        state = "is not the right one" if secret_of(context, key) else "is missing"
        raise AstraflowError(Reason.TOKEN_INVALID, f"the secret in {key} {state}; join the run")


def _value(context: Context, key: str) -> str | bytes | None:
    for name, value in context.invocation_metadata() or ():
        if name == key:
            return value
    return None


def _bytes(secret: str | bytes) -> bytes:
    return secret.encode() if isinstance(secret, str) else secret
