"""Sessions of nodes: who may call, who is still there."""

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import MemberId, PolicyId, RunId
from astraflow.core.members import JoinPool, PoolMembership, Role, Session
from astraflow.core.tasks import WorkflowSpec
from astraflow.gateway.pool.desk import OrderDesk
from astraflow.gateway.pool.nodes import Node
from astraflow.rpc.seats import Seats, SessionLeft
from astraflow.rpc.tokens import SessionTokens, ended_error, token_digest

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_MAX_MESSAGE_NBYTES: Final = 64 << 20


class NodeSessions:
    """Opens and ends them; the desk has the nodes whose session is open.

    Attributes:
        tokens: Of sessions.
        roles: Of all that ever joined.
        seats: Their streams.
        transfer_token: With which they pull weights.
    """

    def __init__(
        self,
        desk: OrderDesk,
        *,
        run_id: RunId,
        workflows: tuple[WorkflowSpec, ...],
        policy_ids: frozenset[PolicyId],
        is_ours: Callable[[PolicyId, int], bool],
        ttl_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Begin without a node.

        Args:
            desk: Gives them work.
            run_id: Told to nodes.
            workflows: Told to nodes.
            policy_ids: That nodes may have engines for.
            is_ours: Whether a version of a policy was published here.
            ttl_s: A node that says nothing for so long has gone.
            clock: In seconds.
        """
        self.tokens = SessionTokens()
        self.roles: dict[MemberId, Role] = {}
        self.seats = Seats()
        self.transfer_token = SessionTokens.mint()
        self._desk = desk
        self._run_id = run_id
        self._workflows = workflows
        self._policy_ids = policy_ids
        self._is_ours = is_ours
        self.ttl = timedelta(seconds=ttl_s)
        self._clock = clock
        self._joins: Counter[str] = Counter()

    def join(self, join: JoinPool) -> PoolMembership:
        """Admit a node; one that resumes its session goes on with its tasks.

        Raises:
            AstraflowError: NAME_TAKEN, POLICY_UNKNOWN.
        """
        unknown = {each.policy_id for each in join.policies} - self._policy_ids
        if unknown or not join.policies:
            raise AstraflowError(
                Reason.POLICY_UNKNOWN,
                f"{join.name} has engines for {sorted(unknown) or 'nothing'}; "
                f"the recipe has {', '.join(sorted(self._policy_ids))}",
            )
        node = self._resumed(join) or self._new(join)
        token = SessionTokens.mint()
        self.tokens.bind(token_digest(token), node.member_id)
        self.roles[node.member_id] = Role.RAAS
        self._desk.nodes[node.member_id] = node
        log.info("a node joined", name=join.name)
        return PoolMembership(
            session=self._session(node, token), run_id=self._run_id, workflows=self._workflows
        )

    def _resumed(self, join: JoinPool) -> Node | None:
        """Return the node whose session goes on; None: it begins anew."""
        if join.resume is None:
            return None
        node = self._desk.nodes.get(self.tokens.owner_of(join.resume.resume_token) or "")
        if node is None:
            return None
        if join.resume.incarnation > node.incarnation:
            self.tokens.fence(node.member_id)
            node.incarnation = join.resume.incarnation
        node.seen_s = self._clock()
        node.resume(join.resume.held_task_ids)
        return node

    def _new(self, join: JoinPool) -> Node:
        if any(node.join.name == join.name for node in self._desk.nodes.values()):
            raise AstraflowError(
                Reason.NAME_TAKEN, f"a node named {join.name} is here; choose another --name"
            )
        self._joins[join.name] += 1
        member_id = MemberId(f"{join.name}-{self._joins[join.name]}")
        return Node(
            member_id=member_id,
            join=join,
            seen_s=self._clock(),
            incarnation=join.resume.incarnation if join.resume else 1,
            live=self._live(join),
        )

    def _live(self, join: JoinPool) -> dict[PolicyId, int]:
        """Return what a node holds of this pool, which it was a member of before."""
        held = [(each.policy_id, each.version) for each in join.policies]
        return {
            policy_id: version
            for policy_id, version in held
            if version is not None and self._is_ours(policy_id, version)
        }

    def _session(self, node: Node, token: bytes) -> Session:
        return Session(
            member_id=node.member_id,
            token=token,
            ttl=self.ttl,
            keep_alive_interval=self.ttl / 3,
            transfer_token=self.transfer_token,
            max_message_nbytes=_MAX_MESSAGE_NBYTES,
            held_task_ids=tuple(node.tasks),
        )

    def node(self, member_id: MemberId) -> Node:
        """Return a node that calls; it was heard.

        Raises:
            AstraflowError: SESSION_ENDED.
        """
        node = self._desk.nodes.get(member_id)
        if node is None:
            raise ended_error(member_id, "it was silent for too long")
        node.seen_s = self._clock()
        return node

    def end(self, member_id: MemberId, why: str) -> None:
        """End a session; what the node had goes to others. Idempotent."""
        node = self._desk.nodes.get(member_id)
        if node is None:
            return
        log.info("a node has left", name=node.join.name, why=why)
        self.tokens.end(member_id, why)
        self.seats.end(member_id, SessionLeft(why))
        self._desk.lose(node, why)

    async def expire(self) -> None:
        """End the sessions of silent nodes, for ever."""
        while True:
            await asyncio.sleep(self.ttl.total_seconds() / 6)
            oldest = self._clock() - self.ttl.total_seconds()
            for node in list(self._desk.nodes.values()):
                if node.seen_s < oldest:
                    self.end(node.member_id, "it was silent for too long")
