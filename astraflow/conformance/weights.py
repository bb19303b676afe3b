"""Checks of a TransferService: that it lets nobody in, and that what it sends is what it said."""

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc
from grpc.aio import AioRpcError

from astraflow.conformance.checks import Broken, Check, CheckList
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import Source as VersionSource
from astraflow.core.versions import SourceKind, SourceState, VersionInfo
from astraflow.rpc.auth import transfer_metadata
from astraflow.rpc.channel import dial
from astraflow.rpc.errors import raised_from
from astraflow.weights.puller import WeightPuller
from astraflow.wire.patches import decode_sent_chunk, digest_of, root_digest
from astraflow.wire.transfers import (
    ChunkSet,
    TransferPlan,
    TransferSpec,
    decode_transfer_plan,
    encode_transfer_spec,
)
from astraflow.wire.weights import decode_layout, layout_digest
from astraflow_proto.weights.v1 import transfer_service_pb2 as pb
from astraflow_proto.weights.v1.transfer_service_pb2_grpc import TransferServiceStub

_TIMEOUT_S: Final = 10.0
_SERVICE: Final = "weights/v1/transfer_service.proto, "

CHECKS: Final = (
    Check(
        name="weights.secret",
        expected="answers TOKEN_INVALID to a call without Session.transfer_token",
        source=_SERVICE + "TransferService",
    ),
    Check(
        name="weights.layout",
        expected="hands out the layout whose BLAKE3 was registered",
        source=_SERVICE + "GetLayout; weights/v1/layout.proto has the canonical form",
    ),
    Check(
        name="weights.unknown_version",
        expected="answers VERSION_UNKNOWN to a Pull of a version that was never published, and"
        " sends no other in its place",
        source=_SERVICE + "Pull",
    ),
    Check(
        name="weights.plan",
        expected="sends the plan first; chunk digests in it add up to a root that was registered",
        source=_SERVICE + "PullResponse; weights/v1/patch.proto, PatchInfo.root_digest",
    ),
    Check(
        name="weights.chunks",
        expected="sends each planned chunk with the digest that the plan has",
        source="weights/v1/patch.proto, Chunk",
    ),
    Check(
        name="weights.resumed",
        expected="leaves out what TransferSpec.have_chunks names",
        source="weights/v1/transfer.proto, TransferSpec.have_chunks",
    ),
    Check(
        name="weights.backpressure",
        expected="serves others while somebody who pulls does not read",
        source=_SERVICE + "Pull",
    ),
    Check(
        name="weights.state",
        expected="serves patches that lead to the registered state digest",
        source="weights/v1/version.proto, VersionInfo.content_digest; docs/weights.md, Digests",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A TransferService, and a version that it serves.

    Attributes:
        address: host:port.
        token: Session.transfer_token of the run.
        told: Returns the version as the run has it registered; it may gain patches.
    """

    address: str
    token: bytes
    told: Callable[[], VersionInfo]

    @property
    def info(self) -> VersionInfo:
        """The version, as it is registered now."""
        return self.told()

    @property
    def spec(self) -> TransferSpec:
        """Asks for the whole version."""
        return TransferSpec(
            policy_id=self.info.policy_id,
            version=self.info.version,
            layout_digest=self.info.layout_digest,
        )


async def check_source(
    checks: CheckList, source: Source, *, keep_laws: Callable[[], None] = lambda: None
) -> bool:
    """Judge all checks of a source; return whether it passed them all.

    Args:
        checks: To be judged.
        source: Of weights.
        keep_laws: Raises where the peer has broken a law: what it does after that says nothing.
    """
    async with _probe(source) as probe:
        found = [await _judge(checks, name, check, keep_laws) for name, check in probe.scripts()]
    return all(found)


async def _judge(
    checks: CheckList,
    name: str,
    check: Callable[[], Coroutine[Any, Any, None]],
    keep_laws: Callable[[], None],
) -> bool:
    try:
        await check()
    except Broken as broken:
        seen = str(broken)
    except AioRpcError as error:
        seen = f"the call failed: {_told(error)}"
    else:
        checks.passed(name)
        return True
    keep_laws()
    checks.failed(name, seen)
    return False


@asynccontextmanager
async def _probe(source: Source) -> "AsyncGenerator[_Probe]":
    channel = dial(source.address)
    try:
        yield _Probe(source, TransferServiceStub(channel))
    finally:
        await channel.close(None)


class _Probe:
    """Calls a source, as a puller does and as no puller should."""

    def __init__(self, source: Source, stub: Any) -> None:
        self._source = source
        self._stub = stub
        self._token = transfer_metadata(source.token)

    def scripts(self) -> list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]]:
        """Return each check by name."""
        return [
            ("weights.secret", self._secret),
            ("weights.layout", self._layout),
            ("weights.unknown_version", self._unknown_version),
            ("weights.plan", self._plan),
            ("weights.chunks", self._chunks),
            ("weights.resumed", self._resumed),
            ("weights.backpressure", self._backpressure),
            ("weights.state", self._state),
        ]

    async def _secret(self) -> None:
        request = pb.GetLayoutRequest(layout_digest=self._source.info.layout_digest)
        wrong = transfer_metadata(b"not the secret of any run")
        await _refused(self._stub.GetLayout(request, metadata=wrong), Reason.TOKEN_INVALID)

    async def _layout(self) -> None:
        wanted = self._source.info.layout_digest
        answer = await self._stub.GetLayout(
            pb.GetLayoutRequest(layout_digest=wanted), metadata=self._token, timeout=_TIMEOUT_S
        )
        found = layout_digest(decode_layout(answer.layout))
        if found != wanted:
            raise Broken(f"its BLAKE3 is {found.hex()}, registered is {wanted.hex()}")

    async def _unknown_version(self) -> None:
        spec = replace(self._source.spec, version=self._source.info.version + 1_000_000)
        await _refused(self._first(spec), Reason.VERSION_UNKNOWN)

    async def _plan(self) -> None:
        plan, _ = await self._pulled(self._source.spec)
        roots = {patch.root_digest for patch in self._source.info.patches}
        for index in plan.patches:
            root = root_digest(index.chunk_digests, index.shared_tables)
            if root != index.patch.root_digest:
                raise Broken(f"digests of patch {index.patch.root_digest.hex()} make {root.hex()}")
            if root not in roots:
                raise Broken(f"nobody registered the root {root.hex()} of the plan")

    async def _chunks(self) -> None:
        plan, chunks = await self._pulled(self._source.spec)
        if len(chunks) != plan.chunk_count:
            raise Broken(f"{len(chunks)} chunks came, the plan has {plan.chunk_count}")
        for message in chunks:
            sent = decode_sent_chunk(message)
            wanted = plan.patches[sent.patch_index].chunk_digests[sent.chunk.header.index]
            if (found := digest_of(sent.chunk)) != wanted:
                raise Broken(
                    f"chunk {sent.chunk.header.index} has the digest {found.hex()}, the plan says"
                    f" {wanted.hex()}"
                )

    async def _resumed(self) -> None:
        plan, _ = await self._pulled(self._source.spec)
        have = tuple(ChunkSet(root_digest=each.patch.root_digest) for each in plan.patches)
        _, chunks = await self._pulled(replace(self._source.spec, have_chunks=have))
        if chunks:
            raise Broken(f"{len(chunks)} chunks came again, though have_chunks names all of them")

    async def _backpressure(self) -> None:
        idle = self._pull(self._source.spec)
        try:
            if await anext(aiter(idle), None) is None:
                raise Broken("a Pull ended without an item")
            await self._pulled(self._source.spec)
        finally:
            idle.cancel()

    async def _state(self) -> None:
        source = VersionSource(
            kind=SourceKind.ORIGIN, state=SourceState.LIVE, endpoint=self._source.address
        )
        info = replace(self._source.info, sources=(source,))

        async def listed() -> tuple[VersionInfo, ...]:
            return (self._source.info,)

        puller = WeightPuller(info.policy_id)
        try:
            await puller.pull(info, {info.version: info}, self._source.token, listed=listed)
        except AstraflowError as error:
            raise Broken(f"{error.message} [{error.reason}]") from error
        finally:
            await puller.close()

    async def _pulled(self, spec: TransferSpec) -> tuple[TransferPlan, list[Any]]:
        """Return plan and chunks of a Pull."""
        items = [each async for each in self._pull(spec) if not each.HasField("waiting")]
        if not items or not items[0].HasField("plan"):
            raise Broken("the first item of a Pull is no plan")
        try:
            return decode_transfer_plan(items[0].plan), [each.chunk for each in items[1:]]
        except AstraflowError as error:
            raise Broken(f"the plan is not sound: {error.message}") from error

    async def _first(self, spec: TransferSpec) -> Any:
        return await anext(aiter(self._pull(spec)), None)

    def _pull(self, spec: TransferSpec) -> Any:
        request = pb.PullRequest(spec=encode_transfer_spec(spec))
        return self._stub.Pull(request, metadata=self._token, timeout=_TIMEOUT_S)


async def _refused(call: Any, reason: Reason) -> None:
    """Let pass a call that is answered with an error of the contract."""
    try:
        await call
    except AioRpcError as error:
        if (found := raised_from(error).reason) is not reason:
            raise Broken(f"it answered {_told(error)} [{found}] in place of {reason}") from error
        return
    raise Broken(f"it answered as if nothing were wrong, in place of {reason}")


def _told(error: AioRpcError) -> str:
    code: grpc.StatusCode = error.code()
    return f"{code.name} ({error.details()})"
