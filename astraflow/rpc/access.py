"""Who may call, and as whom: the tokens of a run and its sessions, checked for each call.

The join token lets members in, the operator token steers; a session token speaks for one member.
"""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.events import Event, RaasJoined, SessionSecrets, TrainerRegistered
from astraflow.core.ids import MemberId
from astraflow.core.members import MemberRole
from astraflow.rpc.auth import SESSION_KEY, bearer_of, is_same_secret, secret_of
from astraflow.rpc.streams import Context

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
    def generate(cls) -> Self:
        return cls(join=secrets.token_urlsafe(24), operator=secrets.token_urlsafe(24))

    def transfer(self, run_id: str) -> bytes:
        """Return the secret that sources of weights compare; the same for the same run."""
        key = hashlib.blake2b(self.operator.encode()).digest()
        return hashlib.blake2b(run_id.encode(), key=key, digest_size=TOKEN_NBYTES).digest()

    def may_join(self, token: str) -> bool:
        """Whether the bearer may become a member."""
        return is_same_secret(token, self.join)

    def may_operate(self, token: str) -> bool:
        """Whether the bearer may steer the run."""
        return is_same_secret(token, self.operator)


class SessionTokens:
    """Finds the member that a session token speaks for.

    A process that reopens its session gets another token, and its older ones go on: its calls
    in progress carry them. The tokens of a process that was replaced are fenced.

    Only digests of tokens are kept, here and in the journal.
    """

    def __init__(self) -> None:
        self._members: dict[bytes, MemberId] = {}
        self._fenced: set[bytes] = set()
        self._ended: dict[MemberId, str] = {}
        self._expected: set[MemberId] = set()

    @staticmethod
    def generate() -> bytes:
        return secrets.token_bytes(TOKEN_NBYTES)

    def bind(self, digest: bytes, member_id: MemberId) -> None:
        """Let the token of a digest speak for a member, whose session is live from now on."""
        self._members[digest] = member_id
        self._ended.pop(member_id, None)
        self._expected.discard(member_id)

    def expect(self, member_id: MemberId) -> None:
        """Let a member say nothing until it has resumed its session."""
        self._expected.add(member_id)

    def fence(self, member_id: MemberId) -> None:
        """Silence all tokens that a member has so far: a newer process took over."""
        self._fenced.update(key for key, owner in self._members.items() if owner == member_id)

    def end(self, member_id: MemberId, message: str) -> None:
        """Note that a member's session ended."""
        self._ended[member_id] = message

    def owner_of(self, token: bytes) -> MemberId | None:
        """Return whose token this is or was; None: not of this run."""
        return self._members.get(token_digest(token))

    def speaks_for(self, token: bytes, *, may_be_ended: bool = False) -> MemberId:
        """Return the member that a token speaks for.

        Raises:
            AstraflowError: TOKEN_INVALID when this run never gave it out; SESSION_FENCED when
                a newer process took over; SESSION_ENDED unless it may be ended.
        """
        key = token_digest(token)
        member_id = self._members.get(key)
        if member_id is None:
            raise AstraflowError(
                Reason.TOKEN_INVALID, "the session token is not of this run; join it again"
            )
        if key in self._fenced:
            raise fenced_error(member_id)
        if member_id in self._ended and not may_be_ended:
            raise ended_error(member_id, self._ended[member_id])
        if member_id in self._expected and not may_be_ended:
            raise ended_error(member_id, "the hub restarted")
        return member_id


def ended_error(member_id: MemberId, message: str) -> AstraflowError:
    """Say that a session ended, and what to do about it."""
    why = f" ({message})" if message else ""
    return AstraflowError(
        Reason.SESSION_ENDED,
        f"the session of member {member_id} ended{why}; join again with SessionResume",
    )


def fenced_error(member_id: MemberId) -> AstraflowError:
    """Say that another process speaks as this member now."""
    return AstraflowError(
        Reason.SESSION_FENCED, f"a newer process took over as member {member_id}; stop this one"
    )


def token_digest(token: bytes) -> bytes:
    """Return BLAKE2b-128 of a secret that is random itself."""
    return hashlib.blake2b(token, digest_size=16).digest()


def without_secrets(event: Event) -> Event:
    """Return an event as the journal has it: with the digest of a token in the token's place."""
    if not isinstance(event, RaasJoined | TrainerRegistered):
        return event
    kept = SessionSecrets(token=token_digest(event.secrets.token), transfer_token=b"")
    return replace(event, secrets=kept)


class Access:
    """Lets calls in, each kind by its own secret."""

    def __init__(
        self, tokens: HubTokens, *, sessions: SessionTokens, roles: Mapping[MemberId, MemberRole]
    ) -> None:
        """Let in by these secrets.

        Args:
            tokens: Of the run.
            sessions: Of its members.
            roles: Of every member that has a session or had one.
        """
        self._tokens = tokens
        self._sessions = sessions
        self._roles = roles

    def joiner(self, context: Context) -> None:
        """Let in who may become a member.

        Raises:
            AstraflowError: TOKEN_INVALID without the run's join token.
        """
        if not self._tokens.may_join(bearer_of(context)):
            raise AstraflowError(
                Reason.TOKEN_INVALID,
                "joining needs the run's join token; take it from ASTRAFLOW_JOIN_TOKEN or hub.json",
            )

    def operator(self, context: Context) -> None:
        """Let in who may steer the run.

        Raises:
            AstraflowError: TOKEN_INVALID without one of the run's tokens; ROLE_NOT_ALLOWED with
                the join token.
        """
        token = bearer_of(context)
        if self._tokens.may_operate(token):
            return
        if self._tokens.may_join(token):
            raise AstraflowError(
                Reason.ROLE_NOT_ALLOWED, "the join token opens no control; use the operator token"
            )
        raise AstraflowError(
            Reason.TOKEN_INVALID,
            "this needs the operator token; take it from ASTRAFLOW_OPERATOR_TOKEN or hub.json",
        )

    def anyone(self, context: Context) -> MemberId | None:
        """Let in a live member, whose id is returned, or an operator.

        Raises:
            AstraflowError: TOKEN_INVALID, SESSION_ENDED, SESSION_FENCED, ROLE_NOT_ALLOWED.
        """
        if secret_of(context, SESSION_KEY):
            return self.member(context)
        self.operator(context)
        return None

    def member(
        self, context: Context, role: MemberRole | None = None, *, may_be_ended: bool = False
    ) -> MemberId:
        """Return the member that calls.

        Raises:
            AstraflowError: TOKEN_INVALID, SESSION_ENDED, SESSION_FENCED; ROLE_NOT_ALLOWED for
                another role.
        """
        token = _session_token(context)
        member_id = self._sessions.speaks_for(token, may_be_ended=may_be_ended)
        if role is not None and self._roles[member_id] is not role:
            raise AstraflowError(
                Reason.ROLE_NOT_ALLOWED,
                f"member {member_id} is a {self._roles[member_id]}; only a {role} makes this call",
            )
        return member_id


def _session_token(context: Context) -> bytes:
    token = secret_of(context, SESSION_KEY)
    if not token:
        raise AstraflowError(
            Reason.TOKEN_INVALID, f"the call carries no session token as {SESSION_KEY}; join first"
        )
    return token
