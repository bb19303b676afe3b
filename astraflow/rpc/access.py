"""Access: who makes a call, from the secrets in its metadata."""

from collections.abc import Mapping

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import MemberId
from astraflow.core.members import Role
from astraflow.rpc.auth import SESSION_KEY, bearer_of, secret_of
from astraflow.rpc.streams import Context
from astraflow.rpc.tokens import HubTokens, SessionTokens


class Access:
    """Lets calls in, each kind by its own secret."""

    def __init__(
        self, tokens: HubTokens, *, sessions: SessionTokens, roles: Mapping[MemberId, Role]
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
        self, context: Context, role: Role | None = None, *, may_be_ended: bool = False
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
