"""Tokens: who may call, and as whom.

The join token lets a process become a member, the operator token lets a person steer the
run; a member then speaks with the secret of its session. All are compared in constant time
or looked up by their digest, so that timing tells nothing.
"""

import hashlib
import secrets
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import Self

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import MemberId

TOKEN_NBYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class HubTokens:
    """The secrets with which a run is entered.

    Attributes:
        join: For members.
        operator: For people who steer the run.
    """

    join: str = field(repr=False)
    operator: str = field(repr=False)

    @classmethod
    def mint(cls) -> Self:
        """Return fresh ones."""
        return cls(join=secrets.token_urlsafe(24), operator=secrets.token_urlsafe(24))

    def may_join(self, token: str) -> bool:
        """Whether the bearer may become a member."""
        return compare_digest(token.encode(), self.join.encode())

    def may_operate(self, token: str) -> bool:
        """Whether the bearer may steer the run."""
        return compare_digest(token.encode(), self.operator.encode())


class SessionTokens:
    """Finds the member that a session token belongs to."""

    def __init__(self) -> None:
        self._members: dict[bytes, MemberId] = {}
        self._newest: dict[MemberId, bytes] = {}

    def mint(self) -> bytes:
        """Return a fresh secret."""
        return secrets.token_bytes(TOKEN_NBYTES)

    def bind(self, token: bytes, member_id: MemberId) -> None:
        """Let a token speak for a member; its older ones only name it from now on."""
        key = _key(token)
        self._members[key] = member_id
        self._newest[member_id] = key

    def member_of(self, token: bytes) -> MemberId:
        """Return whose token this is or was.

        Raises:
            AstraflowError: TOKEN_INVALID when this run never gave it out.
        """
        member_id = self._members.get(_key(token))
        if member_id is None:
            raise AstraflowError(
                Reason.TOKEN_INVALID, "the session token is not of this run; join it again"
            )
        return member_id

    def speaks_for(self, token: bytes) -> MemberId:
        """Return the member that a token speaks for now.

        Raises:
            AstraflowError: TOKEN_INVALID when this run never gave it out; SESSION_FENCED
                when a newer incarnation of the member has another one.
        """
        member_id = self.member_of(token)
        if self._newest[member_id] != _key(token):
            raise AstraflowError(
                Reason.SESSION_FENCED,
                f"a newer process took over as member {member_id}; stop this one",
            )
        return member_id


def _key(token: bytes) -> bytes:
    return hashlib.blake2b(token, digest_size=16).digest()
