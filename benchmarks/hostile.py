"""Attack the HTTP gateway: what it takes of memory, what others wait, and what it answers to noise.

    python benchmarks/hostile.py --fuzz 100000 --seconds 5 --json FILE

The gateway and a node serve in a process of their own, attackers are in a second one, and a caller
from another address asks for something small over a new connection every 10 ms.

- attacks: per attack the peak of the server's memory above idle, and what that caller waited.
- fuzz: seeded requests per port (paths, methods, parameters, headers, bodies, broken bytes). Wrong
  is a status of 500, and an answer that is no JSON or pickle where it says no. Silence is counted
  beside it ("none in time"): most of it waits for what a request promised.
"""

import argparse
import asyncio
import gzip
import json
import os
import pickle
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from safetensors.numpy import save_file

from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype
from astraflow.gateway.http import BodyRules, serve_app
from astraflow.gateway.raas.node import RaasSettings
from astraflow.gateway.raas.serve import serve_raas
from astraflow.gateway.sending import HeldVersion, Pusher, Sender, SenderOffer, sender_app
from astraflow.gateway.serve import serve_gateway, stop_event
from astraflow.gateway.settings import GatewaySettings
from astraflow.gateway.weight_buffer import BufferPlan
from astraflow.raas.policies import ServedModel
from astraflow.rpc.peers import DialRules
from astraflow.telemetry.logging import configure_logging
from astraflow.testing.engine import CharTokenizer, SmallEngine
from astraflow.testing.recipes import small_recipe

BARS: Final = {"peak_mib": 400.0, "max_wait_ms": 100.0, "wrong": 0}
_OTHER: Final = "127.0.0.9"
_FUZZ_CONNECTIONS: Final = 16
# Nobody waits for longer here: for what a request lacks, and for an answer to a whole one.
_SILENT_S: Final = 2.0
_ANSWER_S: Final = 30.0


async def serve() -> None:
    """Serve all ports until killed."""
    configure_logging("gateway")
    rules = BodyRules(reads_pickles=True)
    with tempfile.TemporaryDirectory() as folder:
        save_file({"w": np.zeros(8, np.float16)}, Path(folder) / "model.safetensors")
        recipe = small_recipe(Path(folder), scorer="exact")
        settings = GatewaySettings(recipe=recipe, hub="127.0.0.1:1", token="t", rules=rules)
        driven = RaasSettings(recipe=recipe, rules=rules, models={PolicyId("solver"): Path(folder)})
        engine = ServedModel(engine=SmallEngine(CharTokenizer()), tokenizer=CharTokenizer())
        plan = BufferPlan.of([("w", Dtype.F16, (8,))])
        held = HeldVersion(version=1, plan=plan, flat=np.zeros(plan.nbytes, np.uint8))
        sender = Sender(PolicyId("solver"), offer=SenderOffer(held=held, number=1))
        async with (
            serve_gateway(settings) as gateway,
            serve_raas(driven, {PolicyId("solver"): engine}) as raas,
            Pusher(timeout_s=0.5) as pusher,
            serve_app(
                sender_app(sender, pusher, rules, DialRules()), host="127.0.0.1", rules=rules
            ) as sending,
        ):
            stopped = stop_event()
            ports = {"gateway": gateway.address, "raas": raas.address, "sender": sending}
            print(json.dumps(ports), flush=True)
            await stopped.wait()


@contextmanager
def process(*arguments: str) -> Generator[tuple[psutil.Process, dict[str, str]]]:
    """Run this file in a process; yield it with the line that it prints first."""
    started = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert started.stdout is not None
        yield psutil.Process(started.pid), json.loads(started.stdout.readline())
    finally:
        started.kill()
        started.wait()


# --- attacks, in a process of their own ---


async def ask(address: str, sent: bytes, *, host: str = "127.0.0.1", reads: bool = True) -> bytes:
    """Send bytes over a new connection; return all that comes."""
    to, port = address.split(":")
    reader, writer = await asyncio.open_connection(to, int(port), local_addr=(host, 0))
    try:
        writer.write(sent)
        await writer.drain()
        return await reader.read() if reads else b""
    finally:
        writer.transport.abort()


def request(method: str, path: str, body: bytes = b"", kind: str = "application/json") -> bytes:
    """Return a whole request after which the connection ends."""
    head = f"{method} {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-type: {kind}\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def answer(*headers: str, body: bytes = b"") -> bytes:
    """Return what a peer answers that is dialled."""
    return "\r\n".join(["HTTP/1.1 200 OK", "connection: close", *headers, "", ""]).encode() + body


def layout(tensor_count: int, length: int) -> bytes:
    """Return the buffer info of a sender."""
    tensors = [[f"w{n:05}", [[length], "bfloat16"]] for n in range(tensor_count)]
    fields = {"tensors_meta": tensors, "single_buffer_length": 2 * length * tensor_count}
    return json.dumps(fields).encode()


def peers() -> dict[str, bytes | list[bytes]]:
    """Return what hostile senders answer."""
    bomb = gzip.compress(bytes(1 << 30), 9)
    dense = b'{"x":"' + b"a" * (12 << 20) + b'","y":[' + b'{"":1},' * 260_000 + b"1]}"
    return {
        "gzip": answer("content-encoding: gzip", f"content-length: {len(bomb)}", body=bomb),
        "endless": [answer(), *[b" " * (1 << 20)] * 4000],
        "crumbs": answer("transfer-encoding: chunked", body=b"1\r\n \r\n" * 200_000),
        "dense JSON": answer(body=dense),
        "wide JSON": answer(body=b"[" + b"[]," * 10_000_000 + b"1]"),
        "8 TB": answer(body=layout(1, 1 << 42)),
        "80,000 tensors": answer(body=layout(80_000, 1 << 30)),
        "inside": answer(body=b'{"secret": "of the inside"}'),
    }


async def dialled(address: str, told: bytes | list[bytes]) -> None:
    """Have the gateway dial a hostile sender."""

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            for part in told if isinstance(told, list) else [told]:
                writer.write(part)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve_one, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        fields = {"train_batch_size": 4, "sender_endpoint": f"127.0.0.1:{port}"}
        await ask(address, request("POST", "/ready", json.dumps(fields).encode()))


async def wrong_port(address: str) -> None:
    """Name a port that is none."""
    fields = {"train_batch_size": 4, "sender_endpoint": "127.0.0.1:99999"}
    await ask(address, request("POST", "/ready", json.dumps(fields).encode()))


async def half_open(address: str, sent: bytes) -> None:
    """Hold 1,500 connections that owe something."""
    to, port = address.split(":")
    async with AsyncExitStack() as held:
        for _ in range(1500):
            with suppress(OSError):
                _, writer = await asyncio.open_connection(to, int(port))
                held.callback(writer.transport.abort)
                writer.write(sent)
        await asyncio.sleep(1.0)


async def large(address: str, body: bytes, kind: str) -> None:
    """Send a large body."""
    with suppress(ConnectionError):
        await ask(address, request("POST", "/notify_version", body, kind))


def attacks() -> dict[str, tuple[int, Callable[[str], Awaitable[None]]]]:
    """Return attacks by name, each with how many go on at once."""
    body = b"POST /ready HTTP/1.1\r\nhost: h\r\ncontent-length: 9000\r\n\r\n" + b"x" * 8000
    items = pickle.dumps({"version": [{} for _ in range(1_000_000)]})
    made: dict[str, tuple[int, Callable[[str], Awaitable[None]]]] = {
        f"sender: {name}": (4, lambda to, told=told: dialled(to, told))
        for name, told in peers().items()
    }
    return made | {
        "sender: port 99999": (4, wrong_port),
        "half-open: nothing": (1, lambda to: half_open(to, b"")),
        "half-open: half a head": (1, lambda to: half_open(to, b"GET /batch HTTP/1.1\r\nhost: ")),
        "half-open: slow body": (1, lambda to: half_open(to, body)),
        "body: 60 MB of spaces": (4, lambda to: large(to, b" " * 60_000_000, "application/json")),
        "body: 15 MB of JSON": (
            4,
            lambda to: large(to, b'"' + b"a" * 15_000_000 + b'"', "application/json"),
        ),
        "body: a pickle of 10^6 dicts": (
            4,
            lambda to: large(to, items, "application/octet-stream"),
        ),
    }


async def attack(name: str, address: str) -> None:
    """Attack until killed."""
    count, once = attacks()[name]
    print("{}", flush=True)

    async def again() -> None:
        while True:
            with suppress(OSError):
                await once(address)

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(again())


async def measure_attack(name: str, seconds: float) -> dict[str, float]:
    """Return what an attack costs a fresh server, and who asks it for something small."""
    with process("--serve") as (server, told):
        address = told["gateway"]
        for _ in range(20):
            await small(address)
        idle_nbytes = server.memory_info().rss
        reset_peak(server)
        with process("--attack", name, "--to", address):
            waits = await waited(address, seconds)
        peak_nbytes = peak(server) - idle_nbytes
    ordered = sorted(waits)
    return {
        "peak_mib": round(peak_nbytes / (1 << 20), 1),
        "asked": len(waits),
        "p50_wait_ms": round(ordered[len(waits) // 2], 1),
        "p99_wait_ms": round(ordered[len(waits) * 99 // 100], 1),
        "max_wait_ms": round(ordered[-1], 1),
    }


async def small(address: str) -> float:
    """Ask for something small from another address; return the milliseconds that it took."""
    began = time.perf_counter()
    got = await ask(address, request("POST", "/save_buffer"), host=_OTHER)
    if b" 200 " not in got[:20]:
        raise RuntimeError(f"another caller got {got[:200]!r}")
    return 1e3 * (time.perf_counter() - began)


async def waited(address: str, seconds: float) -> list[float]:
    """Ask every 10 ms; return the milliseconds of each."""
    ends, waits = time.perf_counter() + seconds, list[float]()
    while time.perf_counter() < ends:
        waits.append(await small(address))
        await asyncio.sleep(0.01)
    return waits


def reset_peak(server: psutil.Process) -> None:
    """Forget the peak so far."""
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")


def peak(server: psutil.Process) -> int:
    """Return the most bytes of memory since then."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


# --- fuzz ---

_READY: Final = {"train_batch_size": 4, "sender_endpoint": "127.0.0.1:1", "recovered_version": 0}
_PULL: Final = {"max_items": 4, "timeout": 0}
_PROMPT: Final = {"data": {"prompt": "row"}, "workflow_id": "known"}
_WORKFLOW: Final[dict[str, Any]] = {
    "workflow_id": "known",
    "workflow_cls": "single_turn",
    "gconfig_overrides": {"n_samples": 2, "temperature": 1.0},
    "workflow_kwargs": {},
}
# Fields of a sound request by path; None: it is a GET.
PATHS: Final[dict[str, dict[str, dict[str, Any] | None]]] = {
    "gateway": {
        "/ready": _READY,
        "/batch": None,
        "/notify_version": {"version": 1, "run_eval": False, "model_id": "solver"},
        "/save_buffer": {},
        "/status": None,
        "/raas_pool": None,
        "/register_raas": {"uid": "r", "raas_url": "http://127.0.0.1:1", "gpu_count": 1},
        "/deregister_raas": {"uid": "r", "shutdown": False},
        "/shutdown": {},
        "/openapi.json": None,
        "/nowhere": None,
    },
    "raas": {
        "/status": None,
        "/availability": None,
        "/register_workflow": _WORKFLOW,
        "/submit": _PROMPT,
        "/pull": _PULL,
        "/reset_training_engine": {"timeout": 0},
        "/eval_start": {},
        "/eval_submit": _PROMPT,
        "/eval_pull": _PULL,
        "/eval_end": {},
        "/notify_version": {"version": 1, "sender_endpoint": "127.0.0.1:1", "model_id": "solver"},
        "/shutdown": {},
        "*": None,
    },
    "sender": {
        "/get_version": None,
        "/get_buffer_info": None,
        "/get_capabilities": None,
        "/register_sglang_instance": {
            "sglang_http_host": "127.0.0.1",
            "sglang_http_port": 1,
            "session_ids": ["127.0.0.1:1"],
            "buffer_ptr": 0,
            "buffer_length": 16,
            "zmq_endpoint": "127.0.0.1",
            "zmq_port": 1,
            "handshake_ports": [],
            "sender_group_index": 0,
        },
        "/request_transfer": {"instance_id": "127.0.0.1:1", "mode": "full"},
        "/openapi.json": None,
    },
}
NAMES: Final = ("model_id", "version", "timeout", "data", "other", "")
METHODS: Final = ("PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "get", "X", "POST", "GET")
VALUES: Final = (
    *(None, True, False, 0, 1, 4, -1, 1 << 31, 1 << 63, 10**30, 1e308, -1.5),
    *(float("nan"), float("inf"), "", "solver", "default", "main", "single_turn", "\ud800", "\0"),
    *(
        "127.0.0.1:1",
        "127.0.0.1:99999",
        "[::1]:1",
        "http://127.0.0.1:1",
        "http://h:99999",
        "x" * 9999,
    ),
    *([], {}, [[[]]], {"a": 1}, {"n_samples": 2}, {"temperature": "hot"}, {"prompt": "row"}),
)
KINDS: Final = (
    *("application/json", "application/octet-stream") * 10,
    *("text/plain", "application/json; charset=utf-7", "", "\xff", "multipart/form-data"),
)
ACCEPTS: Final = (
    *("*/*", "application/json", "application/octet-stream", "application/vnd.safetensors"),
    *("text/html", "", "application/json;q=0", ",,,", "\xff"),
)


def noise(dice: random.Random, port: str) -> bytes:
    """Return the bytes of one request."""
    path, sound = dice.choice(list(PATHS[port].items()))
    method = "GET" if sound is None else "POST"
    if dice.random() < 0.1:
        method = dice.choice(METHODS)
    if dice.random() < 0.3:
        query = "&".join(f"{dice.choice(NAMES)}={quoted(dice)}" for _ in range(dice.randrange(4)))
        path += "?" + query
    fields = dict(sound or {})
    for _ in range(dice.randrange(3)):
        fields[dice.choice((*fields, *NAMES))] = dice.choice(VALUES)
    # Waits of a minute are no fault.
    if isinstance(fields.get("timeout"), int | float):
        fields["timeout"] = dice.choice((0, -1, float("nan"), 1e-3))
    kind, value = dice.choice(KINDS), fields if dice.random() < 0.9 else dice.choice(VALUES)
    body = pickle.dumps(value) if "octet" in kind else json.dumps(value).encode()
    head = [
        f"{method} {path} HTTP/1.1",
        "host: h",
        f"content-type: {kind}",
        f"accept: {dice.choice(ACCEPTS)}",
        dice.choice(
            ("x: y", "expect: 100-continue", "authorization: Bearer x", "upgrade: websocket")
        ),
    ]
    raw, sent = bytearray(body), "\r\n".join(head).encode("latin-1")
    if dice.random() < 0.3:
        damage(dice, raw)
    length = len(raw) if dice.random() < 0.98 else dice.choice((0, -1, 1 << 40, "x", "1,2"))
    whole = bytearray(sent + f"\r\ncontent-length: {length}\r\n\r\n".encode() + raw)
    if dice.random() < 0.05:
        damage(dice, whole)
    return bytes(whole)


def quoted(dice: random.Random) -> str:
    """Return a value of a query."""
    value = dice.choice((*VALUES, "abc", "nan", "%00", "%ff", "%", "1e999", "9" * 5000))
    return str(value).encode("ascii", "replace").decode().replace(" ", "+").replace("\0", "%00")


def damage(dice: random.Random, raw: bytearray) -> None:
    """Break bytes."""
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(raw) + 1)
        if dice.random() < 0.3:
            del raw[at : at + dice.randrange(9)]
        else:
            raw[at : at + 1] = dice.randbytes(dice.randrange(3))


class Fuzzer:
    """Sends noise to a port.

    Attributes:
        statuses: How often each was answered.
        wrong: Examples of what is wrong, by kind.
        wrong_count: Of them.
    """

    def __init__(self, port: str, address: str, *, seed: int) -> None:
        """Prepare.

        Args:
            port: Which of PATHS.
            address: host:port.
            seed: Of the requests.
        """
        self.statuses: Counter[str] = Counter()
        self.wrong: dict[str, str] = {}
        self.wrong_count = 0
        self._port = port
        self._address = address
        self._dice = random.Random(seed)
        self._left = 0

    async def run(self, count: int) -> dict[str, Any]:
        """Send so many requests."""
        self._left, began = count, time.perf_counter()
        await asyncio.gather(*(self._send_all() for _ in range(_FUZZ_CONNECTIONS)))
        return {
            "count": count,
            "wrong": self.wrong_count,
            "examples": self.wrong,
            "statuses": dict(sorted(self.statuses.items())),
            "seconds": round(time.perf_counter() - began, 1),
        }

    def note(self, why: str, sent: bytes, body: bytes) -> None:
        """Count what is wrong with an answer."""
        self.wrong_count += 1
        self.wrong.setdefault(why, f"{sent[:300]!r} -> {body[:200]!r}")

    async def _send_all(self) -> None:
        while self._left > 0:
            host, port = self._address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while self._left > 0 and await self._send(reader, writer):
                    pass
            writer.transport.abort()

    async def _send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Send one; return whether the connection is good for another."""
        self._left -= 1
        sent = noise(self._dice, self._port)
        writer.write(sent)
        missing = missing_nbytes(sent)
        silent_s = _SILENT_S if missing is None or missing > 0 else _ANSWER_S
        try:
            async with asyncio.timeout(silent_s):
                head = await reader.readuntil(b"\r\n\r\n")
                while b" 100 " in head[:14]:
                    head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(
                    line.lower().split(": ", 1)
                    for line in head.decode("latin-1").split("\r\n")[1:]
                    if ": " in line
                )
                is_bare = sent[:4] == b"HEAD"
                body = b"" if is_bare else await reader.readexactly(int(fields["content-length"]))
        except TimeoutError:
            # It waits for what the request promised; but for that it answers.
            self.statuses["none in time"] += 1
            if missing is not None and missing <= 0:
                self.note("no answer", sent, b"")
            return False
        except (asyncio.IncompleteReadError, ConnectionError):
            self.statuses["closed"] += 1
            return False
        status = head.split(b" ", 2)[1].decode()
        self.statuses[status] += 1
        if why := fault_of(int(status), fields.get("content-type", ""), body, is_bare=is_bare):
            self.note(why, sent, body)
        return missing == 0 and fields.get("connection") != "close" and status == "200"


def missing_nbytes(sent: bytes) -> int | None:
    """Return how much a request lacks of what it says it has; None: nobody can say."""
    head, end, body = sent.partition(b"\r\n\r\n")
    said = re.findall(rb"(?i)\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", head + b"\r\n")
    return int(said[0]) - len(body) if end and len(said) == 1 else None


def fault_of(status: int, kind: str, body: bytes, *, is_bare: bool) -> str:
    """Return what is wrong with an answer; empty: nothing."""
    if status == 500:
        return "a status of 500"
    if kind.startswith("text/plain"):
        return "a plain text"
    if is_bare or status < 400:
        return ""
    try:
        if kind == "application/vnd.safetensors":
            told = json.loads(json.loads(body[8:])["__metadata__"]["json"])
        else:
            told = pickle.loads(body) if kind == "application/octet-stream" else json.loads(body)
    except Exception:  # noqa: BLE001 - whatever it is, it is no answer
        return f"an error as {kind or 'nothing'}"
    return "" if isinstance(told, dict) and told.get("error") else "an error without a text"


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all rows."""
    rows: dict[str, Any] = {"attacks": {}, "fuzz": {}}
    if options.fuzz:
        with process("--serve") as (server, told):
            for port, address in told.items():
                fuzzer = Fuzzer(port, address, seed=options.seed)
                rows["fuzz"][port] = await fuzzer.run(options.fuzz)
                print(port, json.dumps(rows["fuzz"][port], indent=1))
            rows["fuzz_rss_mib"] = server.memory_info().rss >> 20
    if options.seconds:
        for name in attacks():
            if options.only in name:
                rows["attacks"][name] = await measure_attack(name, options.seconds)
                print(name, json.dumps(rows["attacks"][name]), flush=True)
    return rows


def main() -> None:
    """Print what was measured, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fuzz", type=int, default=100_000, help="requests per port")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack")
    parser.add_argument("--only", default="", help="attacks with this in their name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--to", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
    elif options.attack:
        asyncio.run(attack(options.attack, options.to))
    else:
        before = os.getloadavg()
        rows = asyncio.run(measure(options))
        if options.json:
            report = {"bars": BARS, "load_average": before, "rows": rows}
            options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
