"""A small hub on a real socket, with switches for faults, for what talks to a hub."""

import asyncio
import logging
import os
import resource
import shutil
import subprocess
from collections import Counter, defaultdict
from datetime import timedelta
from pathlib import Path

import pytest
import structlog
from grpc import StatusCode
from hypothesis import settings

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.members import PoolMembership, Session, TrainerRegistration
from astraflow.core.rollouts import Disposition, ItemAck
from astraflow.rpc.auth import SESSION_KEY, bearer_of, secret_of
from astraflow.rpc.concurrency import first_error
from astraflow.rpc.server import Servicer, start_server
from astraflow.rpc.tls import Tls
from astraflow.telemetry.garbage import expect_imports, keep_for_good
from astraflow.wire.common import decode_raas_load, decode_trainer_load, encode_directive
from astraflow.wire.dataflow import (
    decode_ack_batch,
    decode_join_pool,
    decode_register_trainer,
    decode_stream_batches,
    decode_task_credit,
    encode_item_ack,
    encode_pool_membership,
    encode_task_cancellation,
    encode_trainer_registration,
    write_batch_part,
)
from astraflow.wire.rollout import (
    decode_rollout,
    decode_task_result,
    encode_batch_header,
    encode_end_of_data,
)
from astraflow.wire.tasks import encode_rollout_task
from astraflow.wire.versions import decode_version_info, decode_version_report, encode_version_info
from astraflow_proto.dataflow.v1 import raas_service_pb2, session_service_pb2, trainer_service_pb2
from astraflow_proto.dataflow.v1.raas_service_pb2_grpc import add_RaasServiceServicer_to_server
from astraflow_proto.dataflow.v1.session_service_pb2_grpc import (
    add_SessionServiceServicer_to_server,
)
from astraflow_proto.dataflow.v1.trainer_service_pb2_grpc import (
    add_TrainerServiceServicer_to_server,
)
from astraflow_proto.weights.v1 import version_service_pb2
from astraflow_proto.weights.v1.version_service_pb2_grpc import add_VersionServiceServicer_to_server
from crash_ends.nursery import Nursery
from crash_ends.postgres import postgres_server

# Before torch is loaded, here and in all that is started: its threads would spin while they wait
# for each other, and take the cores from those they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

JOIN_TOKEN = "join-secret"
CUT = object()

expect_imports()

# No test asserts a time: an example may take long where the machine is busy.
settings.register_profile("astraflow", deadline=None)
settings.load_profile("astraflow")


def pytest_collection_finish():
    """Spare hubs and nodes in this process the collector's walks over all that was imported."""
    keep_for_good()


class FakeHub:
    """Speaks the contract of a hub, does what a test tells it, and notes what it hears."""

    def __init__(self):
        self.address = ""
        self.heard = asyncio.Condition()
        self.calls = Counter()
        self.faults = defaultdict(list)
        self.sessions = {}
        self.keep_alive_interval = timedelta(seconds=30)
        self.ttl = timedelta(seconds=90)
        self.max_message_nbytes = 1 << 20
        self.held_task_ids = None
        self.held_batch_ids = None
        self.workflows = ()
        self.directive = None
        self.transfer_token = b"transfer"
        self.joins, self.registrations, self.loads, self.ends = [], [], [], []
        self.acks, self.published, self.streams = [], [], []
        self.unsettled = {}
        self.end_of_data = None
        self.credits, self.nacks, self.items, self.reports = [], [], [], []
        self.acks_items = True
        self.disposition = Disposition.ACCEPTED
        self.versions = []
        self._queues = defaultdict(set)
        self._server = None

    async def start(self, listen="127.0.0.1:0"):
        adders = (
            add_SessionServiceServicer_to_server,
            add_TrainerServiceServicer_to_server,
            add_RaasServiceServicer_to_server,
            add_VersionServiceServicer_to_server,
        )
        servicers = [Servicer(add=add, methods=self) for add in adders]
        self._server = await start_server(servicers, listen=listen)
        self.address = self._server.address

    async def stop(self):
        for queues in self._queues.values():
            for queue in queues:
                queue.put_nowait(CUT)
        await self._server.stop()

    async def restart(self, *, forgets=True):
        """Die and come back on the same port, with or without knowing its members."""
        await self.stop()
        if forgets:
            self.sessions.clear()
        await self.start(self.address)

    # What a test does.

    def fail(self, method, code=StatusCode.UNAVAILABLE, *, times=1, error=None):
        self.faults[method] += [error or code] * times

    def cut(self, method):
        """Cut the open streams of a method."""
        for queue in self._queues[method]:
            queue.put_nowait(CUT)

    def push(self, method, message):
        """Send a message on the open streams of a method."""
        for queue in self._queues[method]:
            queue.put_nowait(message)

    def expire(self):
        """End every session; members may open theirs again."""
        self.sessions = dict.fromkeys(self.sessions, Reason.SESSION_ENDED)

    def offer(self, header, parts):
        self.unsettled[header.batch_id] = (header, parts)
        for message in _batch_messages(header, parts):
            self.push("StreamBatches", message)

    def end_data(self, end):
        self.end_of_data = end
        self.push("StreamBatches", end)

    def issue(self, task):
        message = raas_service_pb2.StreamTasksResponse(task=encode_rollout_task(task))
        self.push("StreamTasks", message)

    def withdraw(self, cancellation):
        encoded = encode_task_cancellation(cancellation)
        self.push("StreamTasks", raas_service_pb2.StreamTasksResponse(cancellation=encoded))

    def direct(self, directive):
        encoded = encode_directive(directive)
        self.push("StreamTasks", raas_service_pb2.StreamTasksResponse(directive=encoded))

    def publish(self, info):
        self.versions.append(info)
        encoded = encode_version_info(info)
        self.push("WatchVersions", version_service_pb2.WatchVersionsResponse(version=encoded))

    @property
    def rollouts(self):
        return [item for kind, item in self.items if kind == "rollout"]

    @property
    def results(self):
        return [item for kind, item in self.items if kind == "result"]

    async def until(self, claim):
        """Wait until something that it heard makes a claim true."""
        async with self.heard:
            await self.heard.wait_for(claim)

    # What members call.

    async def KeepAlive(self, request, context):  # noqa: N802
        await self._enter("KeepAlive", context)
        load = request.WhichOneof("load")
        decode = {"raas": decode_raas_load, "trainer": decode_trainer_load}[load]
        await self._note(self.loads, decode(getattr(request, load)))
        response = session_service_pb2.KeepAliveResponse(transfer_token=self.transfer_token)
        response.ttl.FromTimedelta(self.ttl)
        response.server_time.GetCurrentTime()
        if self.directive is not None:
            response.directive.CopyFrom(encode_directive(self.directive))
        return response

    async def EndSession(self, request, context):  # noqa: N802
        await self._enter("EndSession", context)
        await self._note(self.ends, request.message)
        return session_service_pb2.EndSessionResponse()

    async def JoinPool(self, request, context):  # noqa: N802
        session = await self._open("JoinPool", self.joins, decode_join_pool(request), context)
        return encode_pool_membership(
            PoolMembership(session=session, run_id="run", workflows=self.workflows)
        )

    async def RegisterTrainer(self, request, context):  # noqa: N802
        decoded = decode_register_trainer(request)
        session = await self._open("RegisterTrainer", self.registrations, decoded, context)
        return encode_trainer_registration(
            TrainerRegistration(session=session, run_id="run", max_staleness=2, next_version=0)
        )

    async def AckBatch(self, request, context):  # noqa: N802
        await self._enter("AckBatch", context)
        ack = decode_ack_batch(request)
        self.unsettled.pop(ack.batch_id, None)
        await self._note(self.acks, ack)
        return trainer_service_pb2.AckBatchResponse(settled=True)

    async def PublishVersion(self, request, context):  # noqa: N802
        await self._enter("PublishVersion", context)
        info = decode_version_info(request.version)
        await self._note(self.published, info)
        return trainer_service_pb2.PublishVersionResponse(next_version=info.version + 1)

    async def StreamBatches(self, request, context):  # noqa: N802
        first = [
            m for header, parts in self.unsettled.values() for m in _batch_messages(header, parts)
        ]
        if self.end_of_data is not None:
            first.append(self.end_of_data)
        async for message in self._stream("StreamBatches", context, first):
            if not isinstance(message, trainer_service_pb2.StreamBatchesResponse):
                yield trainer_service_pb2.StreamBatchesResponse(
                    end_of_data=encode_end_of_data(message)
                )
                return
            yield message
        self.streams.append(decode_stream_batches(request))

    async def StreamTasks(self, requests, context):  # noqa: N802
        async for message in self._both_ways("StreamTasks", context, self._read_tasks(requests)):
            yield message

    async def _read_tasks(self, requests):
        async for request in requests:
            match request.WhichOneof("request"):
                case "open":
                    await self._note(self.credits, decode_task_credit(request.open.credit))
                case "credit":
                    await self._note(self.credits, decode_task_credit(request.credit))
                case "nack":
                    await self._note(self.nacks, request.nack)

    async def StreamRollouts(self, requests, context):  # noqa: N802
        reading = self._read_rollouts(requests)
        async for message in self._both_ways("StreamRollouts", context, reading):
            yield message

    async def _read_rollouts(self, requests):
        async for request in requests:
            for message in request.items:
                await self._read_item(message)

    async def _read_item(self, message):
        if message.WhichOneof("item") == "rollout":
            item = decode_rollout(message.rollout)
            item_id = item.rollout_id
            await self._note(self.items, ("rollout", item))
        else:
            item = decode_task_result(message.result)
            item_id = item.task_id
            await self._note(self.items, ("result", item))
        if self.acks_items:
            ack = ItemAck(item_id=item_id, disposition=self.disposition)
            answer = raas_service_pb2.StreamRolloutsResponse(acks=[encode_item_ack(ack)])
            self.push("StreamRollouts", answer)

    async def WatchVersions(self, request, context):  # noqa: N802
        after = request.after_version if request.HasField("after_version") else -1
        first = [
            version_service_pb2.WatchVersionsResponse(version=encode_version_info(info))
            for info in self.versions
            if info.version > after
        ]
        async for message in self._stream("WatchVersions", context, first):
            yield message

    async def ReportVersion(self, request, context):  # noqa: N802
        await self._enter("ReportVersion", context)
        await self._note(self.reports, decode_version_report(request))
        return version_service_pb2.ReportVersionResponse()

    # How it goes on.

    async def _note(self, heard, what):
        async with self.heard:
            heard.append(what)
            self.heard.notify_all()

    async def _enter(self, method, context):
        async with self.heard:
            self.calls[method] += 1
            self.heard.notify_all()
        if self.faults[method]:
            fault = self.faults[method].pop(0)
            if isinstance(fault, AstraflowError):
                raise fault
            await context.abort(fault, "a fault that the test asked for")
        token = secret_of(context, SESSION_KEY)
        if method in ("JoinPool", "RegisterTrainer"):
            if bearer_of(context) != JOIN_TOKEN:
                raise AstraflowError(Reason.TOKEN_INVALID, "wrong join token")
        elif token not in self.sessions:
            raise AstraflowError(Reason.TOKEN_INVALID, "no session of this run")
        elif self.sessions[token] is not None:
            raise AstraflowError(self.sessions[token], "the session is over")

    async def _open(self, method, heard, request, context):
        await self._enter(method, context)
        if request.resume is not None and request.resume.resume_token not in self.sessions:
            raise AstraflowError(Reason.TOKEN_INVALID, "no session to continue")
        token = f"session-{len(self.joins) + len(self.registrations)}".encode()
        self.sessions[token] = None
        await self._note(heard, request)
        return Session(
            member_id="member-1",
            token=token,
            ttl=self.ttl,
            keep_alive_interval=self.keep_alive_interval,
            transfer_token=self.transfer_token,
            max_message_nbytes=self.max_message_nbytes,
            held_task_ids=_held(request, "held_task_ids", self.held_task_ids),
            held_batch_ids=_held(request, "held_batch_ids", self.held_batch_ids),
        )

    async def _both_ways(self, method, context, reading):
        with first_error():
            async with asyncio.TaskGroup() as group:
                task = group.create_task(reading)
                async for message in self._stream(method, context):
                    yield message
                task.cancel()

    async def _stream(self, method, context, first=()):
        await self._enter(method, context)
        queue = asyncio.Queue()
        for message in first:
            queue.put_nowait(message)
        self._queues[method].add(queue)
        async with self.heard:
            self.calls[f"{method} open"] += 1
            self.heard.notify_all()
        try:
            while (message := await queue.get()) is not CUT:
                yield message
            await context.abort(StatusCode.UNAVAILABLE, "cut by the test")
        finally:
            self._queues[method].discard(queue)


def _held(request, kind, told):
    """What a test says is held; without that, what the member says."""
    if told is not None:
        return told
    return () if request.resume is None else getattr(request.resume, kind)


def _batch_messages(header, parts):
    messages = [trainer_service_pb2.StreamBatchesResponse(header=encode_batch_header(header))]
    for part in parts:
        message = write_batch_part(part)
        messages.append(trainer_service_pb2.StreamBatchesResponse.FromString(message))
    return messages


@pytest.fixture(scope="session")
def check_metrics():
    """Let promtool look at what a process tells Prometheus, where there is one."""
    promtool = shutil.which("promtool")

    def check(text: str) -> None:
        if promtool is not None:
            subprocess.run([promtool, "check", "metrics"], input=text.encode(), check=True)

    return check


@pytest.fixture
async def fake_hub():
    """A hub on this event loop."""
    hub = FakeHub()
    await hub.start()
    yield hub
    await hub.stop()


@pytest.fixture
def fake_hub_class():
    """For hubs on another event loop."""
    return FakeHub


@pytest.fixture(autouse=True)
def _own_process():
    """Undo what a test, or a main function that it calls, sets about logs and new files here."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    mask = os.umask(0o077)
    os.umask(mask)
    yield
    os.umask(mask)
    for handler in root.handlers[:]:
        if handler not in handlers:
            root.removeHandler(handler)
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture(scope="session")
def make_mixture():
    """Makes a tiny mixture of experts that bf16 can hold; fields of its config may differ."""
    import torch  # noqa: PLC0415 - most tests need none of it
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: PLC0415

    def make(*, seed=0, **fields):
        usual = {
            "vocab_size": 14,
            "hidden_size": 32,
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
            "pad_token_id": 0,
            "eos_token_id": 2,
        }
        torch.manual_seed(seed)
        module = Qwen3MoeForCausalLM(Qwen3MoeConfig(**usual | fields))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(parameter.bfloat16().float())
        return module.eval()

    return make


@pytest.fixture(scope="session")
def pem(tmp_path_factory):
    """A self-signed certificate for localhost, its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
        " -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
        f" -keyout {key} -out {certificate}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    return Tls(certificate=certificate, key=key, ca=certificate)


@pytest.fixture(scope="session")
def postgres():
    """The URL of a PostgreSQL server."""
    try:
        with postgres_server() as url:
            yield url
    except FileNotFoundError as error:
        pytest.skip(str(error))


# What families call the same; each takes the keys that it knows.
TINY_FAMILY = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("ffn_dim", "intermediate_size", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts"), 8),
    "vocab_size": 64,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 4,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
    "attention_types": [[["global", "local"], 1]],
}


@pytest.fixture(scope="session")
def make_family():
    """Make a small model of a family of transformers; the same one each time."""
    import torch  # noqa: PLC0415 - most tests need none
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - seconds to import

    def make(name: str, **given: object) -> torch.nn.Module:
        known = AutoConfig.for_model(name)
        fields = {key: value for key, value in TINY_FAMILY.items() if hasattr(known, key)}
        if name == "falcon":
            del fields["head_dim"]
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, **fields, **given)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()

    return make


@pytest.fixture(scope="session")
def nursery():
    """Yield what starts functions of `processes`, in less than the seconds that torch takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        nursery = Nursery("processes")
    with nursery:
        yield nursery


@pytest.fixture
def full_disk():
    """Make files of this process unable to grow, as on a full disk, until told otherwise."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(nbytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if nbytes is None else nbytes, hard))

    yield limit
    limit(None)
