"""Holding: the verified weights of one policy, in memory, on disk and for a relay's readers."""

import asyncio
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Final

import numpy as np
import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import TensorUpdate, WeightUpdate
from astraflow.core.versions import CodecProfile, PatchInfo, VersionInfo
from astraflow.weights.disk.copy import DiskCopy
from astraflow.weights.disk.files import Loaded
from astraflow.weights.patches.incoming import VerifiedChunks
from astraflow.weights.patches.layouts import ShardLayout
from astraflow.weights.patches.routes import PROFILES, READABLE
from astraflow.weights.patches.state import HeldState, StagedState, dense_updates
from astraflow.weights.serve.relay import WeightRelay, whole_patch
from astraflow.wire.signatures import require_signed

# Elements that are written in less time than it takes to hand them to a thread.
_INLINE_COUNT: Final = 4096

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Holding:
    """What a puller holds; it moves on by staged versions alone.

    Attributes:
        frame: Of the last layout that was fetched; None: none was.
        state: What is held; None: nothing. Its bits are there once `flushed`.
        leftover: Verified chunks of a pull that failed.
    """

    def __init__(
        self, policy_id: PolicyId, *, relay: WeightRelay | None, copy: DiskCopy | None
    ) -> None:
        self.frame: ShardLayout | None = None
        self.state: HeldState | None = None
        self.leftover: VerifiedChunks = {}
        self._policy_id = policy_id
        self._relay = relay
        self._copy = copy
        self._is_restored = copy is None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="astraflow-held")
        self._written: Future[HeldState] | None = None
        self._views: list[weakref.ref[np.ndarray]] = []
        # Held while the state is viewed, or moves on.
        self._viewing = Lock()
        self._serving: asyncio.Future[None] | None = None

    @property
    def version(self) -> int | None:
        return None if self.state is None else self.state.version

    def has(self, target: VersionInfo) -> bool:
        return (
            self.state is not None
            and self.state.version == target.version
            and self.state.frame.digest == target.layout_digest
            and self.state.digest.to_bytes() == target.content_digest
        )

    async def restore(self, known: Mapping[int, VersionInfo]) -> None:
        """Take what the copy on disk holds, once; what the run knows otherwise is not taken."""
        if self._is_restored or self._copy is None:
            return
        loaded = await asyncio.to_thread(self._copy.load)
        self._is_restored = True
        self.frame, self.leftover = loaded.frame, loaded.chunks
        held = loaded.held
        if held is None:
            return
        if await asyncio.to_thread(_is_of_run, loaded, held, known):
            self.state = held
            log.info("found weights on disk", policy_id=self._policy_id, version=held.version)
            return
        self._copy.forget()
        log.warning(
            "the weights on disk are of another run, or nobody signed them",
            policy_id=self._policy_id,
            version=held.version,
            folder=str(self._copy.folder),
        )

    def serve(self, target: VersionInfo) -> None:
        """Have the relay serve what is held: it may be from disk, and new to it."""
        if self._relay is not None and self.state is not None:
            self._relay.hold(self.state, _whole_patch(target))

    async def advance(
        self,
        staged: StagedState,
        base: HeldState | None,
        target: VersionInfo,
        known: Mapping[int, VersionInfo],
    ) -> WeightUpdate:
        """Write the changes; a relay serves nothing from the state meanwhile.

        Where the changes tell what the engine is to do, they are written beside that.
        """
        is_viewed = base is not None and any(each() is not None for each in self._views)
        if self._relay is not None:
            is_viewed = is_viewed or self._relay.is_state_read
            self._relay.release(is_written=bool(staged.changes))
        if staged.changes and is_viewed:
            # Somebody still has the version before as views: it stays as it is.
            flat = await asyncio.to_thread(staged.state.flat.copy)
            staged = replace(staged, state=replace(staged.state, flat=flat))
        if base is None or staged.state.flat is not base.flat:
            self._views = []
        count = sum(len(each.indices) for each in staged.changes)
        if self._copy is None and staged.is_given_by_changes and count <= _INLINE_COUNT:
            with self._viewing:
                staged = self._apart(staged, base)
                self.state = staged.commit()
            self.serve(target)
            return self._update_of(staged, base)
        is_told = staged.is_given_by_changes
        update = await asyncio.to_thread(self._update_of, staged, base) if is_told else None
        with self._viewing:
            staged = self._apart(staged, base)
            commit: Callable[[], HeldState] = staged.commit
            if self._copy is not None:
                commit = partial(self._copy.commit, staged, known, base and base.version)
            self.state = staged.state
            written = self._written = self._threads.submit(commit)
        self._serving = asyncio.ensure_future(self._serve_written(written, target))
        if update is not None:
            return update
        await self.flushed()
        written.result()
        return await asyncio.to_thread(self._update_of, staged, base)

    async def flushed(self) -> None:
        """Return once what is held is written; who is cancelled meanwhile breaks nothing off."""
        if self._serving is not None:
            await asyncio.shield(self._serving)

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        await self.flushed()

    def full_update(self) -> WeightUpdate:
        """Return all that is held: views, for which the next version leaves the state alone.

        On any thread.
        """
        with self._viewing:
            state, written = self.state, self._written
            tensors = () if state is None else self._tensors(state)
        if written is not None:
            written.result()
        if state is None:
            raise AstraflowError(Reason.NOT_READY, f"no weights of {self._policy_id} are held")
        return WeightUpdate(
            policy_id=self._policy_id, version=state.version, base_version=None, tensors=tensors
        )

    def _apart(self, staged: StagedState, base: HeldState | None) -> StagedState:
        """Return a version that leaves the state alone, if that was viewed meanwhile."""
        is_here = base is not None and staged.state.flat is base.flat
        if not (is_here and staged.changes and any(each() is not None for each in self._views)):
            return staged
        return replace(staged, state=replace(staged.state, flat=staged.state.flat.copy()))

    async def _serve_written(self, written: Future[HeldState], target: VersionInfo) -> None:
        try:
            await asyncio.wrap_future(written)
        except Exception as error:  # noqa: BLE001 - whatever it was, it is told
            # Nobody knows how far it came: the next version is pulled from nothing.
            self.state = self._written = None
            log.error(  # noqa: TRY400 - what it is says enough
                "a version could not be written, the next one is pulled whole",
                policy_id=self._policy_id,
                version=target.version,
                why=str(error) or type(error).__name__,
            )
        else:
            self.serve(target)

    def _tensors(self, state: HeldState) -> tuple[TensorUpdate, ...]:
        """Return every tensor as a view that cannot be written to, and take note of it."""
        # Arrays that are cut from it hold on to this one: it is there as long as any of them.
        view = np.frombuffer(state.flat.data, np.uint8)
        view.flags.writeable = False
        self._views.append(weakref.ref(view))
        return dense_updates(state.frame.layout, view)

    def _update_of(self, staged: StagedState, base: HeldState | None) -> WeightUpdate:
        return WeightUpdate(
            policy_id=self._policy_id,
            version=staged.state.version,
            base_version=base and base.version,
            tensors=self._tensors(staged.state)
            if staged.touched is None
            else staged.tensor_updates(),
        )


def _is_of_run(loaded: Loaded, held: HeldState, known: Mapping[int, VersionInfo]) -> bool:
    """Whether a state from disk is a version of the run.

    One that the run no longer lists proves itself by the signatures of its patches, where the
    versions of the run are signed.
    """
    registered = known.get(held.version)
    if registered is not None:
        return is_registered(held, registered)
    newest = known[max(known)]
    if not newest.signing_key:
        return True
    if newest.layout_digest != held.frame.digest or loaded.record.base is not None:
        return False
    try:
        for patch in loaded.record.patches:
            require_signed(newest, patch)
    except AstraflowError:
        return False
    return True


def is_registered(held: HeldState, registered: VersionInfo) -> bool:
    """Whether a state from disk is that of a version, by its state digest and its whole patch.

    Nobody verified the chunks of a state that lies in a file, and the state digest can be forged.
    The root of the whole patch, where the run has one, is BLAKE3 over all bits.
    """
    if registered.content_digest != held.digest.to_bytes():
        return False
    whole = _whole_patch(registered, {CodecProfile.FAST})
    return whole is None or whole_patch(held, whole) is not None


def _whole_patch(
    target: VersionInfo, profiles: Collection[CodecProfile] = PROFILES
) -> PatchInfo | None:
    """Return the patch from nothing that can be made of a state again; None: there is none."""
    for each in target.patches:
        is_whole = each.base_version is None and each.shard_count == 1
        if is_whole and each.profile in profiles and (each.profile, each.codec_version) in READABLE:
            return each
    return None
