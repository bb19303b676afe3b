"""Streams: an answer as server-sent events; what is there at one time goes out in one write."""

import asyncio
from contextlib import ExitStack, aclosing
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from astraflow.core.errors import AstraflowError
from astraflow.raas.agents.completion import Choice, Completion, News
from astraflow.raas.agents.mail import Mail
from astraflow.raas.agents.script import Script

_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
    ],
}


class EventStream:
    """The response to a request whose answer is streamed; an ASGI app of one call."""

    def __init__(self, completion: Completion, script: Script, room: ExitStack) -> None:
        """Prepare; nothing is sampled before the call.

        Args:
            completion: The answer.
            script: How it is written.
            room: Closed at the end.
        """
        self._completion = completion
        self._script = script
        self._room = room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until all is said, something fails, or the client leaves."""
        del scope
        mail: Mail[News] = Mail()
        leaving = asyncio.ensure_future(gone(receive))
        leaving.add_done_callback(lambda _: mail.fail(ClientDisconnect()))
        with self._room:
            try:
                await send(_START)
                await send(_body(self._script.begin(), has_more=True))
                await self._tell(mail, send)
            except AstraflowError as error:
                await send(_body(self._script.fail(error), has_more=False))
            except ClientDisconnect:
                return
            finally:
                leaving.cancel()

    async def _tell(self, mail: Mail[News], send: Send) -> None:
        open_count = self._completion.request.count
        async with aclosing(self._completion.news(mail)) as all_news:
            async for news in all_news:
                written = [self._written(one) for one in news]
                open_count -= sum(isinstance(one, Choice) for one in news)
                if not open_count:
                    written.append(self._script.end())
                await send(_body(b"".join(written), has_more=open_count > 0))

    def _written(self, one: News) -> bytes:
        return self._script.close(one) if isinstance(one, Choice) else self._script.show(one)


async def gone(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _body(body: bytes, *, has_more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": has_more}
