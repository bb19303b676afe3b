"""Peers that break one law in one way each: the kit names the check, and says what to mend."""

import asyncio
import importlib.util
import itertools
import logging
import re
import shlex
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from astraflow.conformance.checks import CheckList, CheckVerdict
from astraflow.conformance.commands import RAAS, TRAINER, CheckTerms, examine
from astraflow.conformance.tap import Fault
from astraflow.conformance.weights import CHECKS, CheckedSource, check_source
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, Layout
from astraflow.rpc.auth import TRANSFER_KEY
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.server import WeightServer
from astraflow_proto.common.v1.tensor_pb2 import DTYPE_I32
from crash_ends.nursery import Nursery

# They wait most of the time.
AT_ONCE = 4
PATIENCE_S = 20.0
LOOK_S = 0.05
TOKEN = b"secret of the run"

PROGRAM = Path(__file__).parents[1] / "peers" / "python" / "broken.py"
_spec = importlib.util.spec_from_file_location("broken", PROGRAM)
broken = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(broken)
On, garble, lose = broken.On, broken.garble, broken.lose
# The process that the kit starts: says which member it stands for, and ends as that does.
STAND_IN = """
import socket, sys
line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
line.sendall(" ".join(sys.argv[2:]).encode() + b"\\n")
sys.exit(int(line.recv(9)))
"""


def other_tensor(message):
    message.layout.tensors[0].dtype = DTYPE_I32


def cut_layout(message):
    message.layout.tensors[0].shape[:] = [-1]


def opened_to_all(call):
    call.metadata[TRANSFER_KEY] = TOKEN


def opened_to_who_shows_none(call):
    call.metadata.setdefault(TRANSFER_KEY, TOKEN)


def is_plan(message):
    return message.HasField("plan")


def is_chunk(message):
    return message.HasField("chunk")


def put_digest(digest):
    def change(message):
        message.plan.patches[0].chunk_digests[0] = digest

    return change


def flipped(message):
    message.chunk.payload = bytes([message.chunk.payload[0] ^ 1]) + message.chunk.payload[1:]


def torn(message):
    message.chunk.payload = message.chunk.payload[:-4]


def fail(_):
    raise AstraflowError(Reason.INTERNAL, "the disk is gone")


class Endless(Fault):
    """Sends the last chunk again and again."""

    def response(self, call, message):
        return itertools.repeat(message, 50) if is_item_chunk(call, message) else [message]


def is_item_chunk(call, message):
    return call.name == "Pull" and message.HasField("chunk")


class Holds(Fault):
    """Sends a plan, and no chunk of it ever."""

    gate = None

    def begin(self, call):
        if call.name == "Pull" and self.gate is None:
            self.gate = self.tap.held("Pull", is_chunk)
            self.gate.__enter__()


class NewestInstead(Fault):
    """Sends the version that it has, whatever it is asked for."""

    def request(self, call, message):
        if call.name == "Pull":
            message.spec.version = 0
        return [message]


class OneOnly(Fault):
    """Serves one who pulls, and nobody while that one does not read; from a resumed Pull on."""

    is_resumed = is_taken = False

    def request(self, call, message):
        if call.name != "Pull" or message.spec.have_chunks or not self.is_resumed:
            self.is_resumed = self.is_resumed or (call.name == "Pull" and message.spec.have_chunks)
            return [message]
        was_taken, self.is_taken = self.is_taken, True
        return [] if was_taken else [message]


# The check, what it says, and the fault.
SOURCES = {
    "open_to_all": (
        "weights.secret",
        "as if nothing were wrong, in place of TOKEN_INVALID",
        On("GetLayout", begin=opened_to_all),
    ),
    "pulls_open_to_all": (
        "weights.secret",
        "as if nothing were wrong, in place of TOKEN_INVALID",
        On("Pull", begin=opened_to_all),
    ),
    "open_to_who_shows_none": (
        "weights.secret",
        "as if nothing were wrong, in place of TOKEN_INVALID",
        On("GetLayout", begin=opened_to_who_shows_none),
    ),
    "wrong_dtype": ("weights.layout", "BLAKE3", On("GetLayout", tell=other_tensor)),
    "unsound_layout": ("weights.layout", "not sound", On("GetLayout", tell=cut_layout)),
    "layout_is_garbage": ("weights.layout", "that are no astraflow", On("GetLayout", tell=garble)),
    "layout_is_nothing": ("weights.layout", "without an answer", On("GetLayout", tell=lose)),
    "layout_never_comes": (
        "weights.layout",
        "DEADLINE_EXCEEDED",
        On("GetLayout", ask=lose, since=2),
    ),
    "newest_instead": ("weights.unknown_version", "in place of VERSION_UNKNOWN", NewestInstead()),
    "pull_fails": ("weights.unknown_version", "INTERNAL", On("Pull", ask=fail, since=2)),
    "no_plan": ("weights.plan", "no plan", On("Pull", tell=lose, wants=is_plan)),
    "plan_is_garbage": ("weights.plan", "that are no astraflow", On("Pull", tell=garble)),
    "digest_of_31_bytes": (
        "weights.plan",
        "plan is not sound",
        On("Pull", tell=put_digest(b"x" * 31), wants=is_plan),
    ),
    "another_digest": (
        "weights.plan",
        "make",
        On("Pull", tell=put_digest(b"x" * 32), wants=is_plan),
    ),
    "torn_chunk": ("weights.chunks", "", On("Pull", tell=torn, wants=is_chunk)),
    "flipped_bit": ("weights.chunks", "has the digest", On("Pull", tell=flipped, wants=is_chunk)),
    "chunk_missing": ("weights.chunks", "0 chunks came", On("Pull", tell=lose, wants=is_chunk)),
    "chunk_twice": ("weights.chunks", "came twice", On("Pull", tell=broken.repeat, wants=is_chunk)),
    "endless": ("weights.chunks", "came twice", Endless()),
    "chunk_of_no_patch": (
        "weights.chunks",
        "which the plan has not",
        On("Pull", tell=broken.put(chunk__patch_index=7), wants=is_chunk),
    ),
    "chunk_of_no_index": (
        "weights.chunks",
        "which the plan has not",
        On("Pull", tell=broken.put(chunk__header__index=7), wants=is_chunk),
    ),
    "dies_before_the_chunks": (
        "weights.chunks",
        "the disk is gone",
        On("Pull", tell=fail, wants=is_chunk),
    ),
    "chunk_never_comes": ("weights.chunks", "DEADLINE_EXCEEDED", Holds()),
    "sends_all_again": (
        "weights.resumed",
        "came again",
        On("Pull", ask=broken.clear("spec__have_chunks")),
    ),
    "serves_one_only": ("weights.backpressure", "DEADLINE_EXCEEDED", OneOnly()),
}


@pytest.fixture
async def member(monkeypatch):
    """Yield the command that starts one, forked where all that it needs has been imported."""
    monkeypatch.syspath_prepend(PROGRAM.parent)
    with Nursery(PROGRAM.stem) as nursery:

        async def stand(asked, answers):
            pid = nursery.start("main", *(await asked.readline()).decode().split())
            killed = asyncio.ensure_future(asked.read())
            while (code := nursery.exit_code(pid)) is None and not killed.done():
                await asyncio.wait([killed], timeout=LOOK_S)
            nursery.kill(pid)
            killed.cancel()
            answers.write(str(code).encode())
            answers.close()

        async with await asyncio.start_server(stand, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            yield shlex.join([sys.executable, "-SEc", STAND_IN, str(port)])


async def findings(role, name, member, turn):
    command = f"{member} {role} {name} {{hub}} {{token}}"
    kind = {"trainer": TRAINER, "raas": RAAS}[role]
    async with turn:
        checks = await examine(kind, CheckTerms(command=command, patience_s=PATIENCE_S))
    return first_failed(checks)


def first_failed(checks):
    failed = (check for check in checks.all if check.verdict is CheckVerdict.FAILED)
    return next(((check.name, check.seen) for check in failed), ("nothing", ""))


def require(faults, found):
    """Require that each was named by its check, and told what was seen."""
    names = {name: check for name, (check, _) in found.items()}
    assert names == {name: check for name, (check, *_) in faults.items()}, found
    untold = {
        n: found[n][1] for n, (_, said, _) in faults.items() if not re.search(said, found[n][1])
    }
    assert untold == {}


@pytest.fixture(autouse=True)
def no_traceback(caplog):
    """Nothing is logged with a traceback, by whomever the command does not keep quiet."""
    caplog.set_level(logging.CRITICAL, "grpc")
    yield
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def few(faults):
    """Return every sixth fault; `make test-all` has all of them."""
    return {name: faults[name] for name in [*faults][::6]}


@pytest.mark.slow
@pytest.mark.parametrize("role", broken.JOINS)
@pytest.mark.parametrize("of", [few, pytest.param(dict, id="every_one", marks=pytest.mark.long)])
async def test_a_broken_member_fails_the_check_of_the_law_that_it_breaks(role, of, member):
    faults, turn = of(broken.table(role)), asyncio.Semaphore(AT_ONCE)
    found = await asyncio.gather(*(findings(role, name, member, turn) for name in faults))
    require(faults, dict(zip(faults, found, strict=True)))


@pytest.fixture(scope="module")
def source():
    publisher = WeightPublisher(PolicyId("solver"), Layout.of([("w", Dtype.F32, (100,))]))
    info = publisher.publish(0, {"w": np.ones(100, np.float32).view(np.uint32)}, step=0)
    with WeightServer(publisher, lanes=()) as server:
        server.set_transfer_token(TOKEN)
        yield CheckedSource(
            address=server.endpoint, token=TOKEN, registered=lambda: info, patience_s=3.0
        )


async def looked_at(source, fault):
    tap = broken.Breaker(fault)
    await tap.serve("127.0.0.1:0")
    tap.origin = source.address
    checks = CheckList(CHECKS)
    await check_source(checks, replace(source, address=tap.address))
    await tap.close()
    return first_failed(checks)


async def test_a_broken_source_of_weights_fails_the_check_of_the_law_that_it_breaks(source):
    found = await asyncio.gather(*(looked_at(source, fault) for *_, fault in SOURCES.values()))
    require(SOURCES, dict(zip(SOURCES, found, strict=True)))


@pytest.mark.parametrize("said", [b"HTTP/1.1 200 OK\r\n\r\n", b"", b"\x00" * 10_000])
async def test_what_is_no_source_of_weights_at_all_fails_every_check(source, said):
    def talk(line):
        with suppress(OSError), line:
            line.sendall(said)
            while line.recv(65_536):
                pass

    def serve():
        with suppress(OSError):
            while True:
                threading.Thread(target=talk, args=server.accept()[:1]).start()

    server = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve)
    thread.start()
    host, port = server.getsockname()
    checks = CheckList(CHECKS)
    await check_source(checks, replace(source, address=f"{host}:{port}", patience_s=0.5))
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()
    assert {check.verdict for check in checks.all} == {CheckVerdict.FAILED}
