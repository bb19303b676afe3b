"""Checks of a TransferService: that it lets nobody in, and that what it sends is what it said."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc
from grpc.aio import AioRpcError

from astraflow.conformance.checks import Broken, CheckList, ContractCheck
from astraflow.conformance.tap import parsed
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import SourceInfo as VersionSource
from astraflow.core.versions import SourceKind, SourceState, VersionInfo
from astraflow.rpc.auth import MetadataPairs, transfer_metadata
from astraflow.rpc.channel import dial
from astraflow.rpc.errors import raised_from
from astraflow.weights.fetch.puller import WeightPuller
from astraflow.wire.transfers import (
    ChunkSet,
    TransferPlan,
    TransferSpec,
    decode_transfer_plan,
    encode_transfer_spec,
)
from astraflow.wire.weights import (
    decode_layout,
    decode_sent_chunk,
    digest_of,
    layout_digest,
    root_digest,
)
from astraflow_proto.weights.v1 import transfer_service_pb2 as pb

# All that a puller does to get a version, in calls.
_PULL_FACTOR: Final = 3
_PATH: Final = "/astraflow.weights.v1.TransferService/"
_SERVICE: Final = "weights/v1/transfer_service.proto, "

CHECKS: Final = (
    ContractCheck(
        name="weights.secret",
        expected="answers TOKEN_INVALID to a GetLayout and a Pull without Session.transfer_token",
        source=_SERVICE + "TransferService",
    ),
    ContractCheck(
        name="weights.layout",
        expected="hands out the layout whose BLAKE3 was registered",
        source=_SERVICE + "GetLayout; weights/v1/layout.proto has the canonical form",
    ),
    ContractCheck(
        name="weights.unknown_version",
        expected="answers VERSION_UNKNOWN to a Pull of a version that was never published, and"
        " sends no other in its place",
        source=_SERVICE + "Pull",
    ),
    ContractCheck(
        name="weights.plan",
        expected="sends the plan first; chunk digests in it add up to a root that was registered",
        source=_SERVICE + "PullResponse; weights/v1/patch.proto, PatchInfo.root_digest",
    ),
    ContractCheck(
        name="weights.chunks",
        expected="sends each planned chunk once, with the digest that the plan has, and ends the"
        " stream behind the last",
        source="weights/v1/patch.proto, Chunk; weights/v1/transfer.proto, TransferPlan.chunk_count",
    ),
    ContractCheck(
        name="weights.resumed",
        expected="leaves out what TransferSpec.have_chunks names",
        source="weights/v1/transfer.proto, TransferSpec.have_chunks",
    ),
    ContractCheck(
        name="weights.backpressure",
        expected="serves others while somebody who pulls does not read",
        source=_SERVICE + "Pull",
    ),
    ContractCheck(
        name="weights.state",
        expected="serves patches that lead to the registered state digest",
        source="weights/v1/version.proto, VersionInfo.content_digest; docs/weights.md, Digests",
    ),
)


ScriptStep = Callable[[], Coroutine[Any, Any, None]]
"""Judges one thing; raises Broken for what a peer does not do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSource:
    """A TransferService, and a version that it serves."""

    address: str
    token: bytes
    registered: Callable[[], VersionInfo]
    patience_s: float = 10.0

    @property
    def spec(self) -> TransferSpec:
        """Asks for the whole version."""
        info = self.registered()
        return TransferSpec(
            policy_id=info.policy_id, version=info.version, layout_digest=info.layout_digest
        )


async def check_source(
    checks: CheckList, source: CheckedSource, *, keep_laws: ScriptStep | None = None
) -> bool:
    """Judge all checks of a source; return whether it passed them all."""
    channel = dial(source.address)
    try:
        steps = _Probe(source, channel).steps()
        found = [await _judge(checks, name, check, keep_laws) for name, check in steps.items()]
    finally:
        await channel.close(None)
    return all(found)


async def _judge(
    checks: CheckList, name: str, check: ScriptStep, keep_laws: ScriptStep | None
) -> bool:
    try:
        await check()
    except Broken as broken:
        seen = str(broken)
    except AioRpcError as error:
        seen = f"the call failed: {_answer_of(error)}"
    except AstraflowError as error:
        seen = f"what it sent is not sound: {error.message} [{error.reason}]"
    except TimeoutError:
        seen = "it took longer than anybody waits"
    else:
        checks.passed(name)
        return True
    if keep_laws is not None:
        try:
            await keep_laws()
        except Broken as broken:
            seen = str(broken)
    checks.failed(name, seen)
    return False


class _Probe:
    """Calls a source, as a puller does and as no puller should."""

    def __init__(self, source: CheckedSource, channel: Any) -> None:
        self._source = source
        self._token = transfer_metadata(source.token)
        # Answers stay bytes until they are looked at.
        self._get_layout = channel.unary_unary(
            f"{_PATH}GetLayout", request_serializer=pb.GetLayoutRequest.SerializeToString
        )
        self._pull_call = channel.unary_stream(
            f"{_PATH}Pull", request_serializer=pb.PullRequest.SerializeToString
        )

    def steps(self) -> dict[str, ScriptStep]:
        """Return each check by name."""
        return {
            "weights.secret": self._secret,
            "weights.layout": self._layout,
            "weights.unknown_version": self._unknown_version,
            "weights.plan": self._plan,
            "weights.chunks": self._chunks,
            "weights.resumed": self._resumed,
            "weights.backpressure": self._backpressure,
            "weights.state": self._state,
        }

    async def _secret(self) -> None:
        for wrong in (transfer_metadata(b"not the secret of any run"), ()):
            await _refused(self._layout_call(metadata=wrong), Reason.TOKEN_INVALID)
            chunks = self._pull(self._source.spec, metadata=wrong)
            await _refused(_first(chunks), Reason.TOKEN_INVALID)

    async def _layout(self) -> None:
        wanted = self._source.registered().layout_digest
        answer = await self._layout_call(metadata=self._token)
        if answer is None:
            raise Broken("GetLayout ended without an answer")
        found = layout_digest(decode_layout(parsed(pb.GetLayoutResponse, answer).layout))
        if found != wanted:
            raise Broken(f"its BLAKE3 is {found.hex()}, registered is {wanted.hex()}")

    async def _unknown_version(self) -> None:
        spec = replace(self._source.spec, version=self._source.registered().version + 1_000_000)
        await _refused(_first(self._pull(spec)), Reason.VERSION_UNKNOWN)

    async def _plan(self) -> None:
        plan, chunks = await self._pulled(self._source.spec)
        await chunks.aclose()
        roots = {patch.root_digest for patch in self._source.registered().patches}
        for index in plan.patches:
            root = root_digest(index.chunk_digests, index.shared_tables)
            if root != index.patch.root_digest:
                raise Broken(f"digests of patch {index.patch.root_digest.hex()} make {root.hex()}")
            if root not in roots:
                raise Broken(f"nobody registered the root {root.hex()} of the plan")

    async def _chunks(self) -> None:
        plan, chunks = await self._pulled(self._source.spec)
        came: set[tuple[int, int]] = set()
        async for message in chunks:
            sent = decode_sent_chunk(message)
            place = sent.patch_index, sent.chunk.header.index
            wanted = _planned(plan, *place)
            if (found := digest_of(sent.chunk)) != wanted:
                raise Broken(
                    f"chunk {place[1]} of patch {place[0]} has the digest {found.hex()}, the plan"
                    f" says {wanted.hex()}"
                )
            if place in came:
                raise Broken(f"chunk {place[1]} of patch {place[0]} came twice")
            came.add(place)
        if len(came) != plan.chunk_count:
            raise Broken(f"{len(came)} chunks came, chunk_count of the plan is {plan.chunk_count}")

    async def _resumed(self) -> None:
        plan, chunks = await self._pulled(self._source.spec)
        await chunks.aclose()
        have = tuple(ChunkSet(root_digest=each.patch.root_digest) for each in plan.patches)
        _, chunks = await self._pulled(replace(self._source.spec, have_chunks=have))
        async for chunk in chunks:
            index = chunk.header.index
            raise Broken(f"chunk {index} came again, though have_chunks names all of them")

    async def _backpressure(self) -> None:
        idle = self._pull(self._source.spec)
        try:
            if await _first(idle) is None:
                raise Broken("a Pull ended without an item")
            _, chunks = await self._pulled(self._source.spec)
            async for _ in chunks:
                pass
        finally:
            idle.cancel()

    async def _state(self) -> None:
        source = VersionSource(
            kind=SourceKind.ORIGIN, state=SourceState.LIVE, endpoint=self._source.address
        )
        info = replace(self._source.registered(), sources=(source,))

        async def listed() -> tuple[VersionInfo, ...]:
            return (self._source.registered(),)

        puller = WeightPuller(info.policy_id, stall_timeout_s=self._source.patience_s)
        try:
            async with asyncio.timeout(_PULL_FACTOR * self._source.patience_s):
                await puller.pull(info, {info.version: info}, self._source.token, listed=listed)
        except AstraflowError as error:
            raise Broken(f"{error.message} [{error.reason}]") from error
        finally:
            await puller.close()

    async def _pulled(self, spec: TransferSpec) -> tuple[TransferPlan, AsyncGenerator[Any]]:
        """Return plan and chunks of a Pull."""
        items = _items(self._pull(spec))
        first = await anext(items, None)
        if first is None or not first.HasField("plan"):
            raise Broken("the first item of a Pull is no plan")
        try:
            return decode_transfer_plan(first.plan), _chunks_of(items)
        except AstraflowError as error:
            raise Broken(f"the plan is not sound: {error.message}") from error

    def _layout_call(self, *, metadata: MetadataPairs) -> Any:
        return self._get_layout(
            pb.GetLayoutRequest(layout_digest=self._source.registered().layout_digest),
            metadata=metadata,
            timeout=self._source.patience_s,
        )

    def _pull(self, spec: TransferSpec, *, metadata: MetadataPairs | None = None) -> Any:
        return self._pull_call(
            pb.PullRequest(spec=encode_transfer_spec(spec)),
            metadata=self._token if metadata is None else metadata,
            timeout=self._source.patience_s,
        )


async def _items(call: Any) -> AsyncGenerator[Any]:
    """Yield what a Pull carries, but for Waiting; the call ends with the generator."""
    try:
        async for raw in call:
            item = parsed(pb.PullResponse, raw)
            if not item.HasField("waiting"):
                yield item
    finally:
        call.cancel()


async def _chunks_of(items: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
    try:
        async for item in items:
            if not item.HasField("chunk"):
                kind = item.WhichOneof("item") or "message without an item"
                raise Broken(f"a {kind} came among the chunks")
            yield item.chunk
    finally:
        await items.aclose()


async def _first(call: Any) -> Any:
    return await anext(aiter(_items(call)), None)


def _planned(plan: TransferPlan, patch_index: int, index: int) -> bytes:
    """Return the digest that a plan has of a chunk."""
    patches = plan.patches
    if patch_index >= len(patches) or index >= len(patches[patch_index].chunk_digests):
        raise Broken(f"chunk {index} of patch {patch_index} came, which the plan has not")
    return patches[patch_index].chunk_digests[index]


async def _refused(call: Any, reason: Reason) -> None:
    """Let pass a call that is answered with an error of the contract."""
    try:
        await call
    except AioRpcError as error:
        if (found := raised_from(error).reason) is not reason:
            raise Broken(
                f"it answered {_answer_of(error)} [{found}] in place of {reason}"
            ) from error
        return
    raise Broken(f"it answered as if nothing were wrong, in place of {reason}")


def _answer_of(error: AioRpcError) -> str:
    code: grpc.StatusCode = error.code()
    return f"{code.name} ({error.details()})"
