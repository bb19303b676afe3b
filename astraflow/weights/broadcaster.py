"""Broadcaster: a publisher's versions go to a group of receivers, beside training."""

import threading
from collections.abc import Iterator
from typing import Final, Self

import numpy as np
import structlog

from astraflow.core.errors import AstraflowError
from astraflow.weights.broadcast import BroadcastGroup, Frame, Rendezvous, SenderMeetings
from astraflow.weights.broadcast_frames import bodies
from astraflow.weights.publisher import WeightPublisher
from astraflow.weights.stored import PatchName, StoredPatch
from astraflow.wire.patches import SentChunk, encode_sent_chunk
from astraflow.wire.transfers import TransferPlan, encode_transfer_plan
from astraflow_proto.weights.v1.transfer_service_pb2 import PullResponse

# Of the deadline; but no sign of life is later than this.
_SIGNS: Final = 4
_SIGN_S: Final = 1.0

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Broadcaster:
    """Sends every version once to all who have a seat, in a thread of its own.

    It goes on with the next group when one breaks, and never holds training up.

    Example:
        >>> where = Rendezvous(host="10.0.0.1", port=29500, receiver_count=8)
        >>> with Broadcaster(publisher, where) as broadcaster:
        ...     client.publish_version(publisher.publish(1, tensors))
        ...     broadcaster.wake()
    """

    def __init__(self, publisher: WeightPublisher, where: Rendezvous) -> None:
        """Prepare; `with` starts the thread."""
        self._publisher = publisher
        self._where = where
        self._sign_s = min(_SIGN_S, where.deadline_s / _SIGNS)
        self._is_over = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Listen for receivers.

        Raises:
            AstraflowError: INVALID_FIELD when the port cannot be listened on.
        """
        meetings = SenderMeetings(self._where, lambda: self._is_over)
        self._thread = threading.Thread(
            target=self._run, args=(meetings,), name="astraflow-broadcast", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the group after what is on its way."""
        self._is_over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def wake(self) -> None:
        """Say that there is a newer version; returns at once."""
        self._wake.set()

    def _run(self, meetings: SenderMeetings) -> None:
        while not self._is_over:
            try:
                self._serve(meetings.meet())
            except AstraflowError as error:
                log.warning("a broadcast group is over; its members pull", why=error.message)

    def _serve(self, group: BroadcastGroup | None) -> None:
        """Send what is published from now on."""
        if group is None:
            return
        sent = self._newest
        log.info("a broadcast group has met", size=self._where.receiver_count + 1, version=sent)
        while not self._is_over:
            while sent < self._newest:
                self._send(group, sent + 1)
                sent += 1
            group.send(Frame(body=np.empty(0, np.uint8), number=sent))
            self._wake.wait(self._sign_s)
            self._wake.clear()

    @property
    def _newest(self) -> int:
        newest = self._publisher.version
        return -1 if newest is None else newest

    def _send(self, group: BroadcastGroup, version: int) -> None:
        patch = self._patch(version)
        if patch is not None:
            with self._publisher.store.reading([patch.info]):
                for body in bodies(self._messages(patch)):
                    group.send(Frame(body=body, number=version - 1))

    def _patch(self, version: int) -> StoredPatch | None:
        """Return what leads to a version from the one before, or from nothing; None: it is old."""
        for base in (version - 1, None):
            name = PatchName(version=version, base_version=base)
            if name in self._publisher.store:
                return self._publisher.store.find(name)
        return None

    def _messages(self, patch: StoredPatch) -> Iterator[PullResponse]:
        info = patch.info
        plan = TransferPlan(
            transfer_id="broadcast",
            patches=(patch.index,),
            chunk_count=info.chunk_count,
            payload_nbytes=info.payload_nbytes,
        )
        yield PullResponse(plan=encode_transfer_plan(plan))
        for index in range(info.chunk_count):
            chunk = self._publisher.store.chunk(info, index)
            sent = SentChunk(patch_index=0, chunk=chunk)
            yield PullResponse(chunk=encode_sent_chunk(sent))
