"""Who may call, and as whom: the tokens of a run and its sessions, checked for each call.

The join token lets in every member, the operator token steers and looks. Tokens of one role are
made from the operator token, and do no more than that role; a certificate may stand for a role,
too. A session token speaks for one member.
"""

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Self

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.events import Event, RaasJoined, TrainerRegistered
from astraflow.core.ids import MemberId
from astraflow.core.members import MemberRole
from astraflow.rpc.auth import SESSION_KEY, Context, bearer_of, is_same_secret, secret_of

TOKEN_NBYTES = 32
TOKEN_ID_LENGTH = 8
_MAC: Final = b"role tokens"
_ROLE_TOKEN: Final = "af1."  # noqa: S105 - how one begins


class TokenRole(StrEnum):
    """What the bearer of a token does."""

    TRAINER = "trainer"
    NODE = "node"
    RELAY = "relay"
    READER = "reader"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What somebody may do.

    Attributes:
        roles: Any of these.
        policy_id: The one that a trainer may train; empty: each.
        token_id: Of the token of a role that says so; empty: no such token does.
    """

    roles: frozenset[TokenRole]
    policy_id: str = ""
    token_id: str = field(default="", compare=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `node`, `relay`, `reader`, `operator`, `trainer`, or `trainer:POLICY`.

        Raises:
            AstraflowError: INVALID_FIELD.
        """
        role, _, policy_id = text.partition(":")
        if role not in set(TokenRole) or (policy_id and role != TokenRole.TRAINER):
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"'{text}' is no role; there are {', '.join(TokenRole)} and trainer:POLICY",
            )
        return cls(roles=_WITH[TokenRole(role)], policy_id=policy_id)

    @property
    def is_relay(self) -> bool:
        """Whether it lets its bearer into the pool to pass weights on, and to take no tasks."""
        return TokenRole.RELAY in self.roles and TokenRole.NODE not in self.roles

    @property
    def what(self) -> str:
        """The roles, for people."""
        return " and ".join(sorted(self.roles)) + (f" of {self.policy_id}" * bool(self.policy_id))


_WITH: Final[Mapping[TokenRole, frozenset[TokenRole]]] = {
    role: frozenset({role}) for role in TokenRole
} | {TokenRole.OPERATOR: frozenset({TokenRole.OPERATOR, TokenRole.READER})}

_MEMBER: Final = Grant(roles=frozenset({TokenRole.TRAINER, TokenRole.NODE}))


@dataclass(frozen=True, slots=True, kw_only=True)
class HubTokens:
    """The secrets with which a run is entered."""

    join: str = field(repr=False)
    operator: str = field(repr=False)

    @classmethod
    def generate(cls) -> Self:
        return cls(join=secrets.token_urlsafe(24), operator=secrets.token_urlsafe(24))

    def transfer(self, run_id: str) -> bytes:
        """Return the secret that sources of weights compare; the same for the same run."""
        return self._derived(run_id.encode())

    def signing_seed(self, run_id: str, policy_id: str) -> bytes:
        """Return the seed of the key that signs a policy's patches; the same for the same run."""
        return self._derived(f"{run_id}|{policy_id}".encode(), b"signing seeds")

    def of_role(self, role: str, *, expire_time: float = 0.0) -> str:
        """Return a token that lets its bearer do what one role does.

        Args:
            role: As `Grant.parse` reads it.
            expire_time: Seconds since 1970 after which it joins and calls nothing; 0: never.
                Sessions that were opened with it go on.

        Raises:
            AstraflowError: INVALID_FIELD for another role.
        """
        Grant.parse(role)
        token_id = secrets.token_hex(TOKEN_ID_LENGTH // 2)
        said = f"{role}|{expire_time:.0f}|{token_id}".encode()
        body = base64.urlsafe_b64encode(said + self._derived(said, _MAC)).decode().rstrip("=")
        return f"{_ROLE_TOKEN}{body}"

    def grant(self, token: str) -> Grant | None:
        """Return what a bearer may do; None: nothing.

        Raises:
            AstraflowError: TOKEN_INVALID for one that has expired.
        """
        joins = is_same_secret(token, self.join)
        if is_same_secret(token, self.operator):
            steers = Grant.parse(TokenRole.OPERATOR)
            # One secret may be both, where everybody may do everything.
            return Grant(roles=steers.roles | _MEMBER.roles) if joins else steers
        if joins:
            return _MEMBER
        if not token.startswith(_ROLE_TOKEN):
            return None
        try:
            said, mac = _taken_apart(token)
        except ValueError:
            return None
        if not said or not hmac.compare_digest(mac, self._derived(said, _MAC)):
            return None
        role, expire_time, token_id = said.decode().split("|")
        if float(expire_time) and time.time() > float(expire_time):
            raise AstraflowError(
                Reason.TOKEN_INVALID, f"the {role} token has expired; ask an operator for another"
            )
        return replace(Grant.parse(role), token_id=token_id)

    def _derived(self, said: bytes, person: bytes = b"") -> bytes:
        """Return what only who has the operator token can make of something."""
        key = hashlib.blake2b(self.operator.encode()).digest()
        return hashlib.blake2b(said, key=key, digest_size=TOKEN_NBYTES, person=person).digest()


def token_id_of(token: str) -> str:
    """Return the id of a token of a role, by which it is revoked; of an id, itself.

    Raises:
        AstraflowError: INVALID_FIELD for what is neither.
    """
    if not token.startswith(_ROLE_TOKEN):
        return required_token_id(token)
    try:
        return required_token_id(_taken_apart(token)[0].decode().rpartition("|")[2])
    except ValueError:
        return required_token_id("")


def _taken_apart(token: str) -> tuple[bytes, bytes]:
    """Return what a token of a role says, and the MAC of that; ValueError: it is none."""
    body = token.removeprefix(_ROLE_TOKEN)
    whole = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    return whole[:-TOKEN_NBYTES], whole[-TOKEN_NBYTES:]


def required_token_id(text: str) -> str:
    if len(text) != TOKEN_ID_LENGTH or set(text) - set("0123456789abcdef"):
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"a token's id has {TOKEN_ID_LENGTH} hexadecimal digits, in lower case; `astraflow"
            " token` shows it, and takes the token itself in its place",
            metadata={"field": "token_id"},
        )
    return text


class SessionTokens:
    """Finds the member that a session token speaks for.

    A process that reopens its session gets another token, and its older ones go on: its calls
    in progress carry them. The tokens of a process that was replaced are fenced.

    Only digests of tokens are kept, here and in the journal.

    Attributes:
        revoked: Ids of tokens of roles that open nothing any more.
    """

    # Not set by the constructor, so that snapshots of releases without them are read.
    revoked: frozenset[str] = frozenset()
    _token_ids: Mapping[MemberId, str] = MappingProxyType({})
    _relays: frozenset[MemberId] = frozenset()

    def __init__(self) -> None:
        self._members: dict[bytes, MemberId] = {}
        self._fenced: set[bytes] = set()
        self._ended: dict[MemberId, str] = {}
        self._expected: set[MemberId] = set()

    @staticmethod
    def generate() -> bytes:
        return secrets.token_bytes(TOKEN_NBYTES)

    def bind(
        self, digest: bytes, member_id: MemberId, *, token_id: str = "", is_relay: bool = False
    ) -> None:
        """Let a session's token speak for a member, whose session is live from now on."""
        if token_id != self._token_ids.get(member_id, ""):
            self._token_ids = {**self._token_ids, member_id: token_id}
        if is_relay != self.is_relay(member_id):
            self._relays ^= {member_id}
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

    def is_relay(self, member_id: MemberId) -> bool:
        """Whether a member takes no tasks."""
        return member_id in self._relays

    def revoke(self, token_id: str) -> None:
        """Let a token of a role open nothing from now on."""
        self.revoked |= {token_id}

    def opened_with(self, token_id: str) -> list[MemberId]:
        """Return whose sessions a token of a role has opened, as far as they have not ended."""
        found = (each for each, opened in self._token_ids.items() if opened == token_id)
        return [each for each in found if each not in self._ended]

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
    digest = token_digest(event.secrets.token)
    return replace(event, secrets=replace(event.secrets, token=digest, transfer_token=b""))


class Access:
    """Lets calls in, each kind by its own secret.

    Without one a call raises TOKEN_INVALID, with one of another role ROLE_NOT_ALLOWED; of a session
    that is over SESSION_ENDED, SESSION_FENCED.
    """

    def __init__(
        self,
        tokens: HubTokens,
        *,
        sessions: SessionTokens,
        roles: Mapping[MemberId, MemberRole],
        identities: Mapping[str, str] | None = None,
    ) -> None:
        """Let in by these secrets; `identities` are names in certificates and their roles."""
        self._tokens = tokens
        self._sessions = sessions
        self._roles = roles
        self._identities = {name: Grant.parse(role) for name, role in (identities or {}).items()}

    def signing_seed(self, run_id: str, policy_id: str) -> bytes:
        """Return what a trainer of a policy signs its patches with: see `HubTokens`."""
        return self._tokens.signing_seed(run_id, policy_id)

    def knows(self, context: Context) -> bool:
        """Whether a caller shows a secret of the run, or a certificate that stands for a role."""
        if self._sessions.owner_of(secret_of(context, SESSION_KEY)) is not None:
            return True
        try:
            self._grant(context, "")
        except AstraflowError:
            return False
        return True

    def joiner(self, context: Context, role: TokenRole, policy_id: str = "") -> Grant:
        """Let in who may become a member of a role, and train a policy; return what it may do.

        A relay becomes a node that takes no tasks.

        Raises:
            AstraflowError: TOKEN_INVALID without a token of the run; ROLE_NOT_ALLOWED with one of
                another role or policy.
        """
        grant = self._grant(
            context,
            "joining needs a token of the run; take the join token from ASTRAFLOW_JOIN_TOKEN or "
            "hub.json, or have `astraflow token` make one",
        )
        is_in = role in grant.roles or (role is TokenRole.NODE and grant.is_relay)
        if not is_in or grant.policy_id not in ("", policy_id):
            asked = f"{role} of {policy_id}" if policy_id else str(role)
            raise AstraflowError(
                Reason.ROLE_NOT_ALLOWED, f"a token for {grant.what} does not join as {asked}"
            )
        return grant

    def operator(self, context: Context, role: TokenRole = TokenRole.OPERATOR) -> None:
        """Let in who may steer the run."""
        grant = self._grant(
            context,
            f"this needs the {TokenRole.OPERATOR} token; take it from ASTRAFLOW_OPERATOR_TOKEN or "
            "hub.json",
        )
        if role not in grant.roles:
            raise AstraflowError(
                Reason.ROLE_NOT_ALLOWED,
                f"a token for {grant.what} opens no control; use the operator token",
            )

    def reader(self, context: Context) -> None:
        """Let in who may look at the run."""
        self.operator(context, TokenRole.READER)

    def anyone(self, context: Context, role: TokenRole = TokenRole.READER) -> MemberId | None:
        """Let in a live member, whose id is returned, or the bearer of a token for a role."""
        if secret_of(context, SESSION_KEY):
            return self.member(context)
        self.operator(context, role)
        return None

    def _grant(self, context: Context, otherwise: str) -> Grant:
        """Return what a caller may do by its token, or else by its certificate."""
        grant = self._tokens.grant(bearer_of(context))
        if grant is None and self._identities:
            grants = [self._identities.get(name) for name in names_of(context)]
            grant = next((each for each in grants if each is not None), None)
        if grant is None:
            raise AstraflowError(Reason.TOKEN_INVALID, otherwise)
        if grant.token_id in self._sessions.revoked:
            raise AstraflowError(
                Reason.TOKEN_INVALID,
                f"the {grant.what} token {grant.token_id} was revoked; ask an operator for another",
            )
        return grant

    def member(
        self, context: Context, role: MemberRole | None = None, *, may_be_ended: bool = False
    ) -> MemberId:
        """Return the member that calls."""
        token = secret_of(context, SESSION_KEY)
        if not token:
            why = f"the call carries no session token as {SESSION_KEY}; join first"
            raise AstraflowError(Reason.TOKEN_INVALID, why)
        member_id = self._sessions.speaks_for(token, may_be_ended=may_be_ended)
        if role is not None and self._roles[member_id] is not role:
            raise AstraflowError(
                Reason.ROLE_NOT_ALLOWED,
                f"member {member_id} is a {self._roles[member_id]}; only a {role} makes this call",
            )
        if role is MemberRole.RAAS and self._sessions.is_relay(member_id):
            raise AstraflowError(
                Reason.ROLE_NOT_ALLOWED,
                f"member {member_id} joined with a token for a relay, which takes no tasks",
            )
        return member_id


def names_of(context: Context) -> list[str]:
    """Return the names in the certificate that a caller showed: alternative ones, then its own.

    Only certificates of the authority that the server trusts get so far.
    """
    said = context.auth_context()
    keys = "x509_subject_alternative_name", "x509_common_name"
    return [name.decode(errors="replace") for key in keys for name in said.get(key, ())]
