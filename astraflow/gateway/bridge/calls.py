"""Calls to a RaaS that speaks HTTP: pickled bodies in an envelope, JSON where published so."""

from collections.abc import Mapping
from typing import Any, Self, cast

import structlog

from astraflow.codec.pickles import pickle_chunks, read_pickle
from astraflow.core.errors import AstraflowError, Reason
from astraflow.gateway.edge.bodies import PICKLE
from astraflow.rpc.peers import DialRules, Peer
from astraflow.rpc.reading import read

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_CALL_S = 30.0


class RaasCalls:
    """One RaaS; every call raises SOURCE_UNREACHABLE, or ENVIRONMENT_FAILED for what it answers."""

    def __init__(self, url: str, *, load_timeout_s: float, dial: DialRules) -> None:
        self.url = url.rstrip("/")
        self._load_timeout_s = load_timeout_s
        self._peer = Peer(url, dial)

    async def __aenter__(self) -> Self:
        """Return it."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close its connections."""
        await self._peer.__aexit__()

    async def status(self) -> Mapping[str, Any]:
        """Return what it says of itself."""
        return await self._peer.ask_json("GET", "/status")

    async def available(self) -> int:
        """Return how many more prompts it takes."""
        answer = await self._peer.ask_json("GET", "/availability")
        return max(0, self._number(answer, "available"))

    async def register_workflow(self, fields: Mapping[str, Any]) -> None:
        """Name a workflow that it has."""
        await self._call("/register_workflow", fields)

    async def submit(self, data: Mapping[str, Any], workflow_id: str, *, is_eval: bool) -> int:
        """Give it a prompt; return its number of the task."""
        path = "/eval_submit" if is_eval else "/submit"
        answer = await self._call(path, {"data": dict(data), "workflow_id": workflow_id})
        return self._number(self._mapping(answer), "task_id")

    async def pull(self, *, is_eval: bool) -> list[Mapping[str, Any]]:
        """Take what has finished; what is taken here is nowhere else."""
        path = "/eval_pull" if is_eval else "/pull"
        answer = await self._call(path, {"max_items": 16, "timeout": 0.1})
        items = self._mapping(answer).get("items") if is_eval else answer
        if not isinstance(items, list):
            raise AstraflowError(Reason.ENVIRONMENT_FAILED, f"{self.url}{path} answers no list")
        return [self._mapping(each) for each in cast("list[Any]", items)]

    async def mark_evals(self, *, are_on: bool) -> None:
        """Say that evaluations begin, or that they have ended."""
        await self._call("/eval_start" if are_on else "/eval_end", {})

    async def notify_version(self, model_id: str, version: int, sender: str) -> Mapping[str, Any]:
        """Have it load a version; returns once it has, or not."""
        fields = {"model_id": model_id, "version": version, "sender_endpoint": sender}
        return self._mapping(await self._call("/notify_version", fields, self._load_timeout_s))

    async def shutdown(self) -> None:
        """Ask it to end."""
        await self._call("/shutdown", {})

    async def _call(self, path: str, fields: Mapping[str, Any], timeout_s: float = _CALL_S) -> Any:
        body = b"".join(pickle_chunks(fields))
        answer = await self._peer.ask("POST", path, body, kind=PICKLE, timeout_s=timeout_s)
        envelope = self._mapping(await read(read_pickle, answer.raw))
        if not envelope.get("ok"):
            # Whoever named the RaaS is told that it refuses; what it says is for this log.
            log.warning("an HTTP RaaS refuses", url=self.url, path=path, why=_short(envelope))
            raise AstraflowError(Reason.ENVIRONMENT_FAILED, f"{self.url}{path} refuses")
        return envelope.get("result")

    def _mapping(self, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise AstraflowError(Reason.ENVIRONMENT_FAILED, f"{self.url} answers no dict")
        return cast("Mapping[str, Any]", value)

    def _number(self, fields: Mapping[str, Any], name: str) -> int:
        value = fields.get(name)
        if type(value) is not int:
            raise AstraflowError(Reason.ENVIRONMENT_FAILED, f"{self.url} says no number of {name}")
        return value


def _short(envelope: Mapping[str, Any]) -> str:
    return str(envelope.get("error"))[:300]
