"""Object stores: the writer of a publisher's versions.

It makes a bucket hold what the publisher's store offers, one version after the other: patches,
then the manifest, and only then the run is told that the version can be had there. What fails is
logged and counted, and tried again, by itself too: nodes that reach the store alone wait for this
version, and the next one may wait for what they sample. Training never waits for it.

    {url}/{policy}/layout-{layout digest}
    {url}/{policy}/{version}/{root digest}.patch ...
    {url}/{policy}/{version}/manifest                   written last, removed first

Of shards every rank writes its own, under names that end with its rank; the version is there once
the manifests of all ranks are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import (
    CodecProfile,
    PatchInfo,
    SourceInfo,
    SourceKind,
    SourceState,
    VersionInfo,
)
from astraflow.storage.buckets import PART, Bucket
from astraflow.weights.patches.layouts import WHOLE, Shard
from astraflow.weights.patches.patch import Patch
from astraflow.weights.publish.background import FIRST_SPANS, BackgroundWorker
from astraflow.weights.publish.publisher import WeightPublisher, combined
from astraflow.wire.signatures import require_signed
from astraflow.wire.versions import PatchObject, VersionManifest, read_manifest, write_manifest
from astraflow.wire.weights import encode_layout

# A span that is none of these is at most four of them: more patches are bytes that few read.
_SPANS: Final = frozenset((1, *FIRST_SPANS))

# What a run waits for the last version at its end.
_LAST_S: Final = 60.0

# How often is looked whether other ranks have written theirs, so many times; after these, and
# after a failure, each time half as often as before.
_LOOK_S: Final = 0.25
_LOOKS: Final = 120
_MOST_LOOK_S: Final = 5.0

# So often a store that fails is tried again at the end.
_LAST_TRIES: Final = 5

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


def layout_name(digest: bytes) -> str:
    return f"layout-{digest.hex()}"


def manifest_name(shard: Shard) -> str:
    return f"manifest{_suffix(shard)}"


def patch_name(info: PatchInfo) -> str:
    shard = Shard(rank=info.shard_rank, count=info.shard_count)
    return f"{info.root_digest.hex()}.patch{_suffix(shard)}"


def _suffix(shard: Shard) -> str:
    return "" if shard.count == 1 else f"-{shard.rank}-of-{shard.count}"


class ObjectWriter(BackgroundWorker):
    """Writes and announces a publisher's versions, in a thread of its own.

    Example:
        >>> with ObjectWriter(publisher, "s3://bucket/runs/7", client.publish_version) as writer:
        ...     client.publish_version(publisher.publish(1, tensors))
        ...     writer.wake()

    Attributes:
        url: Of the policy's folder.
        failure_count: Attempts that failed.
    """

    def __init__(
        self,
        publisher: WeightPublisher,
        url: str,
        announce: Callable[[VersionInfo], object] | None,
    ) -> None:
        """Open the bucket; `with` starts the thread.

        Args:
            publisher: Whose versions are written.
            url: Of a folder that is this run's alone.
            announce: Tells the run of a version again, with where it can be had; None: another
                rank does, which waits for this one.

        Raises:
            AstraflowError: INVALID_FIELD, CAPABILITY_MISSING: see Bucket.
        """
        super().__init__(publisher, name="astraflow-store", last_s=_LAST_S)
        self.failure_count = 0
        self._announce = announce
        self._bucket = Bucket(f"{url.rstrip('/')}/{publisher.policy_id}")
        self.url = self._bucket.url
        self._newest: int | None = None
        self._begun: set[int] = set()
        self._written: dict[int, tuple[PatchInfo, ...]] = {}
        self._announced: set[int] = set()
        self._leaving: set[int] = set()
        self._is_started = False

    def wake(self) -> None:
        self._newest = self._publisher.version
        super().wake()

    def note_patches(self) -> None:
        """Say that versions have gained patches; returns at once."""
        self._wake.set()

    def sync(self) -> bool:
        """Remove what is too old and write what is missing, now; return whether all went well."""
        newest = self._newest
        if newest is None:
            return True
        offered = _offered(self._publisher.store.patches, newest)
        try:
            self._start()
            gone = self._begun - offered.keys()
            for version in sorted(gone & self._leaving):
                self._remove(version)
            self._leaving = gone - self._leaving
            for version in sorted(offered):
                self._write(version, offered)
            for version in sorted(self._unannounced & offered.keys()):
                self._announce_source(version)
        except AstraflowError as error:
            self.failure_count += 1
            log.warning(
                "the object store lacks a part of a version; it is tried again",
                policy_id=self._publisher.policy_id,
                version=newest,
                failure_count=self.failure_count,
                why=str(error),
            )
            return False
        return True

    def _work(self) -> None:
        """Go on until all is written and told, or a newer version, or the end, comes."""
        look_s, looks, failures = _LOOK_S, 0, 0
        while True:
            is_well = self.sync()
            # Other ranks write as well, unless one of them is what ends this one.
            if self._has_failed or (is_well and not self._unannounced):
                return
            looks, failures = looks + 1, failures + (not is_well)
            if self._is_over and (looks > _LOOKS or failures > _LAST_TRIES):
                return
            if self._wake.wait(look_s):
                return
            if not is_well or looks > _LOOKS:
                look_s = min(2 * look_s, _MOST_LOOK_S)

    @property
    def _unannounced(self) -> set[int]:
        """Versions of which all is written here, and the run is still to be told."""
        return set() if self._announce is None else self._written.keys() - self._announced

    def _start(self) -> None:
        """Write the layout, and remove what another process has left; once."""
        if self._is_started:
            return
        for name in self._bucket.names():
            if name.isdecimal():
                is_shared = self._shard.count > 1
                self._remove(int(name), is_shared=is_shared)
                if is_shared:
                    self._remove_others(name)
        frame = self._publisher.store.frame
        content = encode_layout(frame.layout).SerializeToString(deterministic=True)
        self._bucket.write(layout_name(frame.digest), content)
        self._is_started = True

    def _remove(self, version: int, *, is_shared: bool = False) -> None:
        """Remove what is ours of a version; and its folder, unless other ranks may write there."""
        self._bucket.remove(f"{version}/{manifest_name(self._shard)}")
        names = self._bucket.names(str(version))
        ours = [each for each in names if each.endswith(f".patch{_suffix(self._shard)}")]
        if self._shard.count == 1 or (ours == names and not is_shared):
            self._bucket.remove(str(version))
        else:
            for name in ours:
                self._bucket.remove(f"{version}/{name}")
        self._begun.discard(version)
        self._announced.discard(version)
        self._written.pop(version, None)

    def _remove_others(self, folder: str) -> None:
        """Remove what another number of ranks has left: beside ours, no reader finds a version."""
        count = self._shard.count
        ours = [_suffix(Shard(rank=rank, count=count)) for rank in range(count)]
        names = self._bucket.names(folder)
        left = [each for each in names if not each.endswith((*ours, PART))]
        for name in sorted(left, key=lambda name: not name.startswith(manifest_name(WHOLE))):
            self._bucket.remove(f"{folder}/{name}")

    def _write(self, version: int, offered: Mapping[int, Sequence[Patch]]) -> None:
        patches = offered[version]
        infos = tuple(patch.info for patch in patches)
        there = self._written.get(version)
        if there is not None and {*infos} <= {*there}:
            return
        self._begun.add(version)
        try:
            info = self._publisher.info(version)
            for patch in patches:
                if patch.info not in (there or ()):
                    name = f"{version}/{patch_name(patch.info)}"
                    self._bucket.write_parts(name, self._payloads(patch))
        except AstraflowError as error:
            if error.reason is Reason.VERSION_EVICTED:
                return
            raise
        before = (self._written.get(each, ()) for each in sorted(offered) if each < version)
        manifest = VersionManifest(
            version=replace(info, patches=(), sources=()),
            patches=tuple(PatchObject(index=each.index, headers=each.headers) for each in patches),
            reachable=(*(each for infos in before for each in infos), *infos),
        )
        name = f"{version}/{manifest_name(self._shard)}"
        self._bucket.write(name, write_manifest(manifest))
        self._written[version] = infos

    def _payloads(self, patch: Patch) -> Iterator[bytes | memoryview]:
        store = self._publisher.store
        with store.reading([patch.info]):
            for index in range(patch.info.chunk_count):
                yield store.chunk(patch.info, index).payload

    def _announce_source(self, version: int) -> None:
        """Tell the run where a version can be had, once all of it is there."""
        uri = f"{self.url}/{version}"
        source = SourceInfo(kind=SourceKind.OBJECT_STORE, state=SourceState.LIVE, uri=uri)
        info = self._info(version)
        if info is None or self._announce is None:
            return
        try:
            self._announce(replace(info, sources=(source,)))
        except AstraflowError as error:
            # Nobody asks any more for what is no longer listed.
            if error.reason is not Reason.VERSION_EVICTED:
                raise
        self._announced.add(version)

    @property
    def _shard(self) -> Shard:
        return self._publisher.history.shard_layout.shard

    def _info(self, version: int) -> VersionInfo | None:
        """Return what the ranks of this trainer wrote of a version; None: one has not yet."""
        shards = [Shard(rank=rank, count=self._shard.count) for rank in range(self._shard.count)]
        infos, known = list[VersionInfo](), self._publisher.info(version)
        for shard in shards:
            try:
                content = self._bucket.read(f"{version}/{manifest_name(shard)}")
            except FileNotFoundError:
                return None
            manifest = read_manifest(content)
            if manifest.version.signing_key != known.signing_key:
                raise AstraflowError(
                    Reason.SIGNATURE_INVALID, f"{self.url}/{version} is signed by somebody else"
                )
            patches = tuple(patch.index.patch for patch in manifest.patches)
            for patch in patches:
                try:
                    require_signed(known, patch)
                except AstraflowError as error:
                    raise AstraflowError(error.reason, f"{self.url}: {error.message}") from error
            infos.append(replace(manifest.version, patches=patches))
        return replace(combined(infos), patches=())


def _offered(patches: Sequence[Patch], newest: int) -> dict[int, list[Patch]]:
    """Return by version what is worth its room: of each base the smallest patch.

    Of shards that is the fast one, which all ranks have: they belong together as they are coded.
    """
    smallest: dict[tuple[int, int | None], Patch] = {}
    for patch in patches:
        info = patch.info
        span = 1 if info.base_version is None else info.version - info.base_version
        is_own = info.shard_count > 1 and info.profile is not CodecProfile.FAST
        if info.version > newest or span not in _SPANS or is_own:
            continue
        place = (info.version, info.base_version)
        known = smallest.get(place)
        if known is None or info.payload_nbytes < known.info.payload_nbytes:
            smallest[place] = patch
    found: dict[int, list[Patch]] = {}
    for (version, _), patch in smallest.items():
        found.setdefault(version, []).append(patch)
    return found
