"""What the run knows of its weights, and what files hold of them, for people and machines."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from astraflow.client.control import ControlClient
from astraflow.client.raas import dial_pool
from astraflow.client.session import MemberHooks
from astraflow.codec.state_digest import StateDigest
from astraflow.config.loader import load_recipe
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.members import Contract, JoinPool, RaasLoad, ServedPolicy
from astraflow.core.versions import VersionInfo
from astraflow.rpc.concurrency import beside
from astraflow.rpc.tls import Tls
from astraflow.storage.weight_files import compare, flatten, read_weights, write_weights
from astraflow.weights.fetch.object_lane import stored_version
from astraflow.weights.fetch.puller import WeightPuller
from astraflow.weights.patches.incoming import IncomingVersion
from astraflow.weights.patches.layouts import ShardLayout
from astraflow.wire.weights import KEY_NBYTES, layout_digest
from astraflow.workflows.building import recipe_codes

_SHOWN_TENSORS = 20


async def show_versions(run_dir: RunDir, *, policy: str | None, as_json: bool) -> None:
    """Print what can be pulled of each policy, oldest first.

    Raises:
        AstraflowError: POLICY_UNKNOWN; NOT_READY when no hub of this run can be reached.
    """
    async with ControlClient.of(run_dir) as control:
        known = [each.policy_id for each in (await control.get_run()).policies]
        policies = [PolicyId(policy)] if policy else known
        versions = [info for each in policies for info in await control.versions(each)]
    if as_json:
        print_json([_described(info) for info in versions])
        return
    table = Table("policy", "version", "step", "patches", "smallest", "sources", "published")
    for info in versions:
        smallest = min((patch.payload_nbytes for patch in info.patches), default=0)
        time = f"{info.publish_time:%H:%M:%S}" if info.publish_time else ""
        counts = (len(info.patches), f"{smallest:,} B", len(info.sources))
        table.add_row(info.policy_id, *map(str, (info.version, info.step, *counts)), time)
    Console().print(table)


async def show_version(
    run_dir: RunDir, *, policy: str | None, version: int | None, as_json: bool
) -> None:
    """Print one version: its digests, the patches that lead to it, who has it.

    Raises:
        AstraflowError: VERSION_UNKNOWN, POLICY_UNKNOWN, NOT_READY.
    """
    info = _chosen(await _versions(run_dir, policy), version)
    if as_json:
        print_json(_described(info))
        return
    console = Console()
    console.print(f"[bold]{info.policy_id} {info.version}[/], after {info.step} optimizer steps")
    console.print(f"layout  {info.layout_digest.hex()}\ncontent {info.content_digest.hex()}")
    console.print(f"signing key {info.signing_key.hex() or 'none: it is not signed'}")
    patches = Table("from", "profile", "chunks", "payload", "root digest")
    for patch in info.patches:
        base = "nothing" if patch.base_version is None else str(patch.base_version)
        size = f"{patch.payload_nbytes:,} B"
        patches.add_row(
            base, patch.profile, str(patch.chunk_count), size, patch.root_digest.hex()[:16]
        )
    sources = Table("source", "state", "where", "region")
    for source in info.sources:
        sources.add_row(source.kind, source.state, source.endpoint or source.uri, source.region)
    console.print(patches, sources)


async def pull_version(
    run_dir: RunDir, *, policy: str | None, version: int | None, out: Path, as_json: bool
) -> None:
    """Pull a version, verify it, and write it as `model.safetensors` below a directory.

    Raises:
        PullFailed: When no source gave it whole and true.
        AstraflowError: VERSION_UNKNOWN, POLICY_UNKNOWN, NOT_READY.
    """
    infos = await _versions(run_dir, policy)
    info = _chosen(infos, version)
    bar = PullBar(f"{info.policy_id} {info.version}", is_quiet=as_json)
    tls = Tls.of(run_dir.read_endpoint().tls)
    puller = WeightPuller(info.policy_id, progress=bar, tls=tls)
    try:
        async with _transfer_token(run_dir, info.policy_id) as token:
            with bar:
                known = {each.version: each for each in infos}
                pulled = await puller.pull(info, known, token)
    finally:
        await puller.close()
    file = out / "model.safetensors"
    await asyncio.to_thread(write_weights, file, pulled.update.tensors)
    seconds = pulled.duration.total_seconds()
    if as_json:
        fields = {"file": str(file), "nbytes": pulled.nbytes, "seconds": seconds}
        print_json({**_described(info), **fields})
    else:
        Console().print(f"{file}: version {info.version}, {pulled.nbytes:,} B in {seconds:.2f} s")


async def verify_stored(uri: str, *, key: str, as_json: bool) -> None:
    """Print a version in an object store that one of the run's trainers registered; ask no hub.

    Raises:
        AstraflowError: INVALID_FIELD for a key that is none; what `stored_version` raises.
    """
    try:
        signing_key = bytes.fromhex(key)
    except ValueError:
        signing_key = b""
    if len(signing_key) != KEY_NBYTES:
        raise AstraflowError(
            Reason.INVALID_FIELD, "--key needs the 64 digits that `astraflow weights inspect` shows"
        )
    info = await asyncio.to_thread(stored_version, uri, signing_key)
    if as_json:
        print_json(_described(info))
        return
    nbytes = sum(patch.payload_nbytes for patch in info.patches)
    Console().print(
        f"version {info.version} of {info.policy_id}: {len(info.patches)} patches, {nbytes:,} B,"
        " all signed by a trainer of the run"
    )


async def verify_weights(
    path: Path, *, run_dir: RunDir | None, policy: str | None, version: int | None, as_json: bool
) -> None:
    """Print the digests of files, and which version of a run they are.

    Raises:
        AstraflowError: INVALID_FIELD for files that are not sound; DIGEST_MISMATCH when a run
            is given and they are not the version asked for, or none of it.
    """
    layout, flat = await asyncio.to_thread(lambda: flatten(read_weights(path)))
    content = StateDigest.of(layout, flat).to_bytes()
    found: dict[str, Any] = {
        "tensors": len(layout.tensors),
        "nbytes": layout.nbytes,
        "layout_digest": layout_digest(layout).hex(),
        "content_digest": content.hex(),
    }
    if run_dir is not None:
        infos = await _versions(run_dir, policy)
        wanted = infos if version is None else [_chosen(infos, version)]
        same = [info.version for info in wanted if info.content_digest == content]
        if not same:
            names = ", ".join(str(info.version) for info in wanted)
            raise AstraflowError(
                Reason.DIGEST_MISMATCH, f"{path} has not the bits of any of these versions: {names}"
            )
        found["version"] = same[0]
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        Console().print(f"{name:15} {value}")


def show_diff(old: Path, new: Path, *, as_json: bool) -> None:
    """Print which tensors differ, and in how many elements.

    Raises:
        AstraflowError: INVALID_FIELD for files that are not sound.
    """
    first, second = read_weights(old), read_weights(new)
    diffs = compare(first, second)
    total = sum(each.bits.size for each in first.values())
    changed = sum(diff.changed_count for diff in diffs)
    share = changed / max(1, total)
    if as_json:
        rows = [asdict(diff) for diff in diffs]
        print_json({"elements": total, "changed": changed, "share": share, "tensors": rows})
        return
    table = Table("tensor", "changed", "of", "share", "")
    for diff in sorted(diffs, key=lambda each: -each.changed_count)[:_SHOWN_TENSORS]:
        part = f"{diff.changed_count / max(1, diff.element_count):.2%}"
        table.add_row(
            diff.name, f"{diff.changed_count:,}", f"{diff.element_count:,}", part, diff.note
        )
    console = Console()
    if diffs:
        console.print(table)
    more = f", {len(diffs) - _SHOWN_TENSORS} more tensors" if len(diffs) > _SHOWN_TENSORS else ""
    console.print(f"{changed:,} of {total:,} elements differ ({share:.3%}){more}")


def print_json(value: Any) -> None:
    """Print a value for machines, on one line."""
    Console(soft_wrap=True).print(json.dumps(value), markup=False, highlight=False)


async def _versions(run_dir: RunDir, policy: str | None) -> list[VersionInfo]:
    async with ControlClient.of(run_dir) as control:
        known = [each.policy_id for each in (await control.get_run()).policies]
        if policy is None and len(known) > 1:
            raise AstraflowError(
                Reason.INVALID_FIELD, f"the run has {', '.join(known)}; give --policy"
            )
        return list(await control.versions(PolicyId(policy) if policy else known[0]))


def _chosen(infos: list[VersionInfo], version: int | None) -> VersionInfo:
    wanted = [info for info in infos if version is None or info.version == version]
    if not wanted:
        held = ", ".join(str(info.version) for info in infos) or "none"
        raise AstraflowError(
            Reason.VERSION_UNKNOWN, f"version {version} cannot be pulled; there are: {held}"
        )
    return wanted[-1]


def _described(info: VersionInfo) -> dict[str, Any]:
    """Return a version as JSON values: bytes are hexadecimal."""

    def plain(value: Any) -> str:
        return value.hex() if isinstance(value, bytes) else str(value)

    return json.loads(json.dumps(asdict(info), default=plain))


@asynccontextmanager
async def _transfer_token(run_dir: RunDir, policy_id: PolicyId) -> AsyncGenerator[bytes]:
    """Be a member that takes no tasks for a while: sources serve members only."""
    endpoint = run_dir.read_endpoint()
    join = JoinPool(
        name=f"pull-{os.getpid()}",
        contract=Contract(),
        capacity=1,
        policies=(ServedPolicy(policy_id=policy_id, max_context_token_count=1),),
        codes=recipe_codes(load_recipe(run_dir.recipe)),
    )
    hooks = MemberHooks(load=RaasLoad)
    async with dial_pool(
        endpoint.address,
        token=endpoint.join_token,
        join=join,
        hooks=hooks,
        tls=Tls.of(endpoint.tls),
    ) as client:
        await client.join()
        async with beside(client.session.run()):
            yield client.session.info.transfer_token
        await client.session.end("pulled what it wanted")


class PullBar(Progress):
    """Shows what a puller tells of one version while it is entered: bytes of payload."""

    def __init__(self, what: str, *, is_quiet: bool) -> None:
        """Show nothing yet.

        Args:
            what: Is pulled.
            is_quiet: Show nothing at all.
        """
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=is_quiet,
        )
        self._task = self.add_task(f"pulling {what}", total=None)
        self._incoming: IncomingVersion | None = None

    def begin(self, incoming: IncomingVersion, frame: ShardLayout) -> None:
        del frame
        self._incoming = incoming

    def note(self) -> None:
        incoming = self._incoming
        if incoming is None:
            return
        left = incoming.left_nbytes
        total = None if left is None else incoming.nbytes + left
        self.update(self._task, completed=incoming.nbytes, total=total)
