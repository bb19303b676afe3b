"""The endpoint: one HTTP server per node, and the sessions that are open on it."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from urllib.parse import quote

import structlog

from astraflow.config.extras import install
from astraflow.config.pool import Agents
from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.address import advertised, split_address
from astraflow.rpc.tls import Tls
from astraflow.workflows.agents.session import AgentSession, SessionEndpoint

AGENT_TOKEN = "ASTRAFLOW_AGENT_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable of a node: what agents that are started elsewhere show to get an episode."""

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class AgentEndpoint:
    """Lets agents in; it listens from the first session on.

    Attributes:
        settings: Of the recipe.
        token: Asked of agents that want an episode.
    """

    def __init__(self, settings: Agents | None = None, *, token: str | None = None) -> None:
        """Listen on nothing yet; without a token, only agents that this node starts know it."""
        self.settings = settings or Agents()
        self.token = token or secrets.token_urlsafe(24)
        self._sessions: dict[str, AgentSession] = {}
        self._keys: dict[str, AgentSession] = {}
        self._offered: list[tuple[str, AgentSession]] = []
        self._news = asyncio.Event()
        self._exits = AsyncExitStack()
        self._request_count = 0
        self._starting = asyncio.Lock()
        self._url = ""

    @asynccontextmanager
    async def open(self, session: AgentSession) -> AsyncGenerator[SessionEndpoint]:
        """Serve a session until the end of the context; what it still samples is withdrawn."""
        url = await self.url_of(session)
        self._sessions[session.session_id] = self._keys[session.key] = session
        try:
            yield SessionEndpoint(base_url=f"{url}/v1", session_url=url, key=session.key)
        finally:
            session.end()
            del self._sessions[session.session_id], self._keys[session.key]

    async def queue(self, lane: str) -> tuple[str, str]:
        """Return where the sessions of a lane are handed out: a URL to POST to, a bearer token."""
        return f"{await self.url()}/sessions?lane={quote(lane, safe='')}", self.token

    def offer(self, session: AgentSession, lane: str) -> None:
        """Hand an open session to the next agent that asks for one."""
        # Those that ended while nobody asked would stay for ever, as of a program that died.
        waiting = [each for each in self._offered if each[1].is_open]
        self._offered = [*waiting, (lane, session)]
        self._news.set()
        self._news = asyncio.Event()

    async def take(self, lane: str, *, wait_s: float) -> AgentSession | None:
        """Return the session that was offered first; None: there was none in this time."""
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    for each in self._offered:
                        if each[0] == lane and each[1].is_open:
                            self._offered.remove(each)
                            return each[1]
                    await self._news.wait()
        except TimeoutError:
            return None

    def session(self, session_id: str) -> AgentSession:
        """Return an open session.

        Raises:
            AstraflowError: TASK_UNKNOWN.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise AstraflowError(
                Reason.TASK_UNKNOWN,
                "there is no such session; it is over, or belongs to another node",
            )
        return session

    def session_of_key(self, key: str) -> AgentSession:
        """Return the session of an API key.

        Raises:
            AstraflowError: TOKEN_INVALID.
        """
        session = self._keys.get(key)
        if session is None:
            raise AstraflowError(
                Reason.TOKEN_INVALID,
                "the API key is of no open session; use the OPENAI_API_KEY and OPENAI_BASE_URL "
                "that the episode was started with",
            )
        return session

    @contextmanager
    def reserve(self, count: int) -> Generator[None]:
        """Take room for some generations.

        Raises:
            AstraflowError: OVERLOADED when too many run.
        """
        limit = self.settings.max_requests
        if self._request_count + count > limit:
            raise AstraflowError(
                Reason.OVERLOADED,
                f"{self._request_count} generations run and raas.agents.max_requests is {limit}; "
                "try again in a moment",
                retryable=True,
            )
        self._request_count += count
        try:
            yield
        finally:
            self._request_count -= count

    async def url(self) -> str:
        """Return http://host:port, or https, as agents dial it; begins to listen."""
        async with self._starting:
            self._url = self._url or await self._start()
        return self._url

    async def url_of(self, session: AgentSession) -> str:
        """Return where a session is; begins to listen."""
        return f"{await self.url()}/sessions/{session.session_id}"

    async def close(self) -> None:
        """End all sessions and stop listening."""
        for session in tuple(self._sessions.values()):
            session.end()
        await self._exits.aclose()

    async def _start(self) -> str:
        try:
            from astraflow.raas.agents.app import make_app  # noqa: PLC0415 - an extra
            from astraflow.rpc.http import HttpLimits, HttpServer  # noqa: PLC0415
        except ImportError as error:
            raise AstraflowError(
                Reason.CAPABILITY_MISSING,
                f"{error}, which agents are served with: {install('http')}, on every node",
            ) from error
        settings = self.settings
        limits = HttpLimits(head_s=settings.patience_s)
        tls = Tls.of(settings.tls.model_dump())
        server = await HttpServer.start(
            make_app(self), listen=settings.listen, limits=limits, tls=tls
        )
        self._exits.push_async_callback(server.close)
        address = advertised(*split_address(server.address), settings.advertise)
        url = f"{'http' if tls.is_plain else 'https'}://{address}"
        log.info("agents are served", url=f"{url}/v1")
        return url
