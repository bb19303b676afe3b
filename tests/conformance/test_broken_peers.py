"""Peers that break one law in one way each: the kit names the check, and says what to mend.

Each is a sound peer of ours behind a tap, which breaks what passes. As a program this file is one
of them: `python test_broken_peers.py ROLE FAULT HUB TOKEN`.
"""

import asyncio
import itertools
import os
import re
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from astraflow.conformance.checks import CheckList, Verdict
from astraflow.conformance.faults import EveryResponse, Pass
from astraflow.conformance.methods import method_of
from astraflow.conformance.play import RAAS, TRAINER, Terms, examine
from astraflow.conformance.tap import Tap
from astraflow.conformance.weights import CHECKS, Source, check_source
from astraflow.core.dtype import Dtype
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.layout import Layout
from astraflow.raas.policies import ServedModel
from astraflow.rpc.auth import BEARER_KEY, SESSION_KEY, TRANSFER_KEY
from astraflow.testing import CharTokenizer, SmallEngine, small_recipe, train_counter
from astraflow.testing.nodes import make_node
from astraflow.weights.publisher import WeightPublisher
from astraflow.weights.server import WeightServer
from astraflow_proto.common.v1 import failure_pb2, session_pb2
from astraflow_proto.common.v1.tensor_pb2 import DTYPE_F64, DTYPE_I32
from astraflow_proto.dataflow.v1 import raas_service_pb2, trainer_service_pb2
from astraflow_proto.dataflow.v1.trainer_service_pb2_grpc import TrainerServiceStub
from astraflow_proto.weights.v1 import version_pb2

# They wait most of the time.
AT_ONCE = 4
PATIENCE_S = 10.0


TOKEN = b"secret of the run"
JOINS = {"trainer": "RegisterTrainer", "raas": "JoinPool"}


class Breaker(Tap):
    """Stands before a sound peer, and makes it a broken one."""

    def __init__(self, fault):
        super().__init__()
        self.faults.append(fault)
        self.queues = {}
        fault.tap = self

    def say(self, call, message):
        """Send one message more on a stream of the peer."""
        self.queues[call].put_nowait(message.SerializeToString())

    async def _requests(self, call, requests):
        self.queues[call] = queue = asyncio.Queue()
        reading = asyncio.ensure_future(self.read(super()._requests(call, requests), queue))
        try:
            while (message := await queue.get()) is not None:
                yield message
        finally:
            reading.cancel()

    async def read(self, requests, queue):
        async for each in requests:
            await queue.put(each)
        await queue.put(None)

    def stub(self):
        return TrainerServiceStub(
            self._channel(method_of("/astraflow.dataflow.v1.TrainerService/AckBatch"))
        )


class Garbage:
    """Stands in the place of a message."""

    def SerializeToString(self):  # noqa: N802 - as messages have it
        return b"\xff\xfe garbage"


class On(Pass):
    """Breaks a call of one name.

    Args:
        name: Of the call; or of each, to look at all.
        ask, tell: What becomes of a request or a response: None: what the function made of it in
            place; else a list of others.
        begin: Changes the call.
        since: From this one on of those that are wanted.
        wants: Which.
    """

    def __init__(self, name, *, ask=None, tell=None, begin=None, since=0, wants=bool):
        self.name, self.since, self.wants, self.seen = name, since, wants, 0
        self.ask, self.tell, self.at_begin = ask, tell, begin

    def begin(self, call):
        if self.at_begin and call.name == self.name:
            self.at_begin(call)

    def request(self, call, message):
        return self.changed(self.ask, call, message)

    def response(self, call, message):
        return self.changed(self.tell, call, message)

    def changed(self, change, call, message):
        if change is None or call.name != self.name or not self.wants(message):
            return [message]
        self.seen += 1
        others = change(message) if self.seen > self.since else None
        return [message] if others is None else others


def lose(_):
    return []


def garble(_):
    return [Garbage()]


def repeat(message):
    return [message, message]


def die(_):
    os._exit(9)


def put(**values):
    """Return what sets fields, by their path with __ for the dot."""

    def change(message):
        for path, value in values.items():
            *parents, last = path.split("__")
            part = message
            for name in parents:
                part = part[0] if name == "first" else getattr(part, name)
            setattr(part, last, value(getattr(part, last)) if callable(value) else value)

    return change


def clear(path):
    def change(message):
        *parents, last = path.split("__")
        for name in parents:
            message = getattr(message, name)
        message.ClearField(last)

    return change


def numbered(version):
    """Return what publishes a version under another number."""

    def change(message):
        message.version.version = version
        for patch in message.version.patches:
            patch.version, base = version, patch.base_version
            patch.base_version = min(base, version - 1)
            if version == 0 or not base:
                patch.ClearField("base_version")

    return change


def without(key):
    return lambda call: call.metadata.pop(key, None)


def no_deadline(call):
    call.timeout_s = None


def is_drain(message):
    return message.directive.kind == session_pb2.DIRECTIVE_KIND_DRAIN


class Drainless(Pass):
    """Never hears that it is to go."""

    def response(self, call, message):
        if call.name in ("KeepAlive", "StreamTasks", "StreamBatches"):
            if call.name == "KeepAlive":
                message.ClearField("directive")
            elif message.HasField("directive"):
                return []
        return [message]


class Acks(Pass):
    """Settles what has not come: a batch with its header, or one that nobody sent."""

    def __init__(self, batch_id=None):
        self.batch_id, self.tasks = batch_id, []

    def response(self, call, message):
        if call.name == "StreamBatches" and message.HasField("header"):
            batch_id = self.batch_id or message.header.batch_id
            self.tasks.append(asyncio.ensure_future(self.settle(call, batch_id)))
        return [message]

    async def settle(self, call, batch_id):
        request = trainer_service_pb2.AckBatchRequest(
            batch_id=batch_id, outcome=trainer_service_pb2.BATCH_OUTCOME_CONSUMED, step=1
        )
        await self.tap.stub().AckBatch(request, metadata=tuple(call.metadata.items()), timeout=5)


class SecondStream(Pass):
    """Takes batches on two streams at once."""

    def __init__(self):
        self.tasks = []

    def response(self, call, message):
        if call.name == "StreamBatches" and not self.tasks:
            self.tasks.append(asyncio.ensure_future(self.read(call)))
        return [message]

    async def read(self, call):
        stream = self.tap.stub().StreamBatches(
            call.requests[0], metadata=tuple(call.metadata.items())
        )
        async for _ in stream:
            pass


class AnswersOtherwise(Pass):
    """Repeats an ack, with another outcome or not at all."""

    def __init__(self, change):
        self.change, self.acked = change, set()

    def request(self, call, message):
        if call.name != "AckBatch" or message.batch_id not in self.acked:
            if call.name == "AckBatch":
                self.acked.add(message.batch_id)
            return [message]
        others = self.change(message)
        return [message] if others is None else others


def first_rollout(change):
    """Return what changes the first rollout of a message, through numpy where it is an array."""

    def apply(message):
        for item in message.items:
            if item.HasField("rollout"):
                change(item.rollout)

    return On("StreamRollouts", ask=apply)


def array(name, dtype, change):
    """Return what changes an array of the first trajectory of each rollout."""

    def apply(rollout):
        for trajectory in rollout.trajectories:
            tensor = getattr(trajectory, name)
            values = change(np.frombuffer(tensor.data, dtype).copy())
            tensor.data, tensor.shape[:] = values.tobytes(), values.shape

    return first_rollout(apply)


def filled(value):
    def change(values):
        values[-1] = value
        return values

    return change


def longer_span(rollout):
    rollout.trajectories[0].version_spans[0].length += 1


def newer_span(rollout):
    rollout.trajectories[0].version_spans[0].version += 1_000_000


def as_doubles(rollout):
    tensor = rollout.trajectories[0].logprobs
    tensor.data = np.frombuffer(tensor.data, np.float32).astype(np.float64).tobytes()
    tensor.dtype = DTYPE_F64


class Items(Pass):
    """Changes the list of items that are sent on a StreamRollouts."""

    def __init__(self, change):
        self.change = change

    def request(self, call, message):
        if call.name != "StreamRollouts":
            return [message]
        items = self.change(call, list(message.items))
        return [raas_service_pb2.StreamRolloutsRequest(items=items)] if items else []


def is_result(item):
    return item.HasField("result")


def miscounted(_, items):
    for item in filter(is_result, items):
        item.result.rollout_count += 1
    return items


def results_first(_, items):
    return sorted(items, key=is_result, reverse=True)


def no_results(_, items):
    return [item for item in items if not is_result(item)]


def twice(_, items):
    return [each for item in items for each in (item, item)]


def once_only():
    """Return what never sends anything again."""
    sent = set()

    def change(_, items):
        fresh = [item for item in items if item.SerializeToString() not in sent]
        sent.update(item.SerializeToString() for item in fresh)
        return fresh

    return Items(change)


def renamed():
    """Return what sends a rollout under another id each time."""
    numbers = itertools.count()

    def change(_, items):
        for item in items:
            if item.HasField("rollout"):
                item.rollout.rollout_id += f"-{next(numbers)}"
        return items

    return Items(change)


class DeafToDeadlines(Pass):
    """Forgets a task whose deadline passed."""

    def __init__(self):
        self.task_ids = set()
        self.items = Items(self.left)

    def left(self, _, items):
        return [item for item in items if item.result.task_id not in self.task_ids]

    def request(self, call, message):
        return self.items.request(call, message)

    def response(self, call, message):
        cancelled = call.name == "StreamTasks" and message.HasField("cancellation")
        if cancelled and message.cancellation.reason == raas_service_pb2.CANCEL_REASON_DEADLINE:
            self.task_ids.add(message.cancellation.task_id)
        return [message]


class GivesBack(Pass):
    """Gives its first task back, because it has no place; and closes it all the same."""

    def __init__(self, reason, *, closes):
        self.reason, self.closes, self.task_id = reason, closes, None

    def response(self, call, message):
        if call.name == "StreamTasks" and message.HasField("task") and self.task_id is None:
            self.task_id = message.task.task_id
            nack = raas_service_pb2.TaskNack(
                task_id=self.task_id, failure=failure_pb2.Failure(reason=self.reason)
            )
            self.tap.say(call, raas_service_pb2.StreamTasksRequest(nack=nack))
            return [message] if self.closes else []
        return [message]


class TrustsChunks(EveryResponse):
    """Goes live on whatever chunk comes: here by mending the one that the kit spoils."""

    def __init__(self):
        super().__init__("WatchVersions", self.lead)
        self.is_mended = False

    def lead(self, message):
        for source in message.version.sources:
            source.endpoint = self.tap.address

    def response(self, call, message):
        if call.name == "Pull" and message.chunk.payload and not self.is_mended:
            self.is_mended = True
            payload = message.chunk.payload
            message.chunk.payload = bytes([payload[0] ^ 1]) + payload[1:]
        return super().response(call, message)


def is_live(message):
    return message.state == version_pb2.VERSION_STATE_LIVE


# What every member can do wrong; the call that joins is put in.
MEMBERS = {
    "no_contract_version": (
        "{joined}",
        "contract 0 is not spoken",
        lambda join: On(join, ask=clear("contract__contract_version")),
    ),
    "no_join_token": (
        "{joined}",
        "TOKEN_INVALID",
        lambda join: On(join, begin=without(BEARER_KEY)),
    ),
    "speaks_no_grpc": ("{joined}", "nothing of this came .* an answered", lambda _: None),
    "never_keeps_alive": (
        "session.kept_alive",
        "passed without one",
        lambda _: On("KeepAlive", ask=lose),
    ),
    "comes_back_as_a_stranger": (
        "session.resumed",
        "again without the token",
        lambda join: On(join, ask=clear("resume"), since=1),
    ),
    "comes_back_as_a_new_process": (
        "session.resumed",
        "incarnation is 2",
        lambda join: On(join, ask=put(resume__incarnation=2), since=1),
    ),
    "never_leaves": ("member.drained", "EndSession", lambda _: Drainless()),
    "leaves_with_an_error": ("member.drained", "exit code is 3", lambda _: Pass()),
}

TRAINERS = {
    "unknown_policy": (
        "trainer.registered",
        "POLICY_UNKNOWN",
        On("RegisterTrainer", ask=put(policy_id="nobody")),
    ),
    "no_weight_endpoints": (
        "trainer.registered",
        "weight_endpoints",
        On("RegisterTrainer", ask=clear("weight_endpoints")),
    ),
    "begins_at_version_5": (
        "versions.first",
        "version 5 was refused",
        On("PublishVersion", ask=numbered(5)),
    ),
    "never_publishes": ("versions.first", "a version", On("PublishVersion", ask=lose)),
    "publishes_garbage": (
        "calls.valid",
        "PublishVersion was refused: .* that are no astraflow",
        On("PublishVersion", ask=garble),
    ),
    "digest_too_short": (
        "calls.valid",
        "content_digest",
        On("PublishVersion", ask=put(version__content_digest=b"short")),
    ),
    "leaves_a_hole": (
        "versions.next",
        "version 2 was refused",
        On("PublishVersion", ask=numbered(2), wants=lambda m: m.version.version == 1),
    ),
    "goes_back": (
        "versions.next",
        "version 0 was refused",
        On("PublishVersion", ask=numbered(0), wants=lambda m: m.version.version == 1),
    ),
    "lies_about_its_state": (
        "weights.state",
        "DIGEST_MISMATCH",
        On("PublishVersion", ask=put(version__content_digest=lambda old: bytes(len(old)))),
    ),
    "never_acks": ("batches.acked", "an AckBatch", On("AckBatch", ask=lose)),
    "acks_what_nobody_sent": ("batches.acked", "never sent", Acks("batch-of-nobody")),
    "acks_early": ("batches.backpressure", "parts before its last", Acks()),
    "asks_for_no_batch": (
        "batches.backpressure",
        "max_outstanding is 0",
        On("StreamBatches", ask=put(max_outstanding=0)),
    ),
    "second_stream": ("batches.backpressure", "second stream", SecondStream()),
    "acks_in_two_ways": (
        "acks.repeated",
        "RETURNED after CONSUMED",
        AnswersOtherwise(put(outcome=trainer_service_pb2.BATCH_OUTCOME_RETURNED)),
    ),
    "never_repeats_an_ack": ("acks.repeated", "the ack again", AnswersOtherwise(lose)),
    "never_opens_again": (
        "batches.redelivered",
        "a new StreamBatches",
        On("StreamBatches", ask=lose, since=1),
    ),
    "acks_without_a_deadline": (
        "calls.deadlines",
        "AckBatch came without",
        On("AckBatch", begin=no_deadline),
    ),
    "acks_without_its_secret": (
        "calls.secrets",
        "AckBatch was refused",
        On("AckBatch", begin=without(SESSION_KEY)),
    ),
    "dies_of_a_lost_answer": ("acks.repeated", "exit code 9", AnswersOtherwise(die)),
}

RAASES = {
    "no_capacity": ("raas.joined", "capacity", On("JoinPool", ask=put(capacity=0))),
    "trusts_chunks": ("weights.corrupt_chunk", "went live on bytes", TrustsChunks()),
    "never_live": (
        "versions.reported",
        "VERSION_STATE_LIVE",
        On("ReportVersion", ask=lose, wants=is_live),
    ),
    "live_at_what_is_not": (
        "versions.reported",
        "never published",
        On("ReportVersion", ask=put(version=1_000_000), wants=is_live),
    ),
    "versions_go_back": (
        "versions.reported",
        "LIVE, and",
        On("ReportVersion", ask=put(version=0), wants=is_live, since=2),
    ),
    "no_open": (
        "tasks.credit",
        "is not open",
        On(
            "StreamTasks",
            ask=lambda m: [raas_service_pb2.StreamTasksRequest(credit=m.open.credit)],
            wants=lambda m: m.HasField("open"),
        ),
    ),
    "no_credit": (
        "tasks.credit",
        "a StreamTasks that tasks can be sent on",
        On("StreamTasks", ask=put(open__credit__max_outstanding=0)),
    ),
    "gives_back_what_it_asked_for": (
        "tasks.credit",
        "its own credit",
        GivesBack(failure_pb2.REASON_CAPACITY_EXCEEDED, closes=False),
    ),
    "closes_what_it_gave_back": (
        "tasks.closed",
        "given back",
        GivesBack(failure_pb2.REASON_ENGINE_FAILED, closes=True),
    ),
    "positive_logprobs": (
        "rollouts.accepted",
        "above 0",
        array("logprobs", np.float32, filled(0.5)),
    ),
    "nan_logprobs": (
        "rollouts.accepted",
        "not finite",
        array("logprobs", np.float32, filled(np.nan)),
    ),
    "mask_too_short": (
        "rollouts.accepted",
        "sampled_mask",
        array("sampled_mask", np.bool_, lambda mask: mask[:-1]),
    ),
    "spans_too_long": ("rollouts.accepted", "do not cover", first_rollout(longer_span)),
    "span_of_the_future": ("rollouts.accepted", "no version", first_rollout(newer_span)),
    "logprobs_are_f64": ("rollouts.accepted", "logprobs", first_rollout(as_doubles)),
    "unknown_task": (
        "rollouts.accepted",
        "no such task",
        first_rollout(put(task_id="task-of-nobody", group_id="group-of-nobody")),
    ),
    "reward_is_nan": ("rollouts.accepted", "reward", first_rollout(put(reward=float("nan")))),
    "result_does_not_add_up": (
        "tasks.closed",
        "its result has",
        Items(miscounted),
    ),
    "never_closes": ("tasks.closed", "the TaskResult of a task", Items(no_results)),
    "result_comes_first": ("tasks.closed", "behind the TaskResult", Items(results_first)),
    "sends_twice": ("rollouts.backpressure", "came 2 times", Items(twice)),
    "never_sends_again": ("rollouts.redelivered", "comes again", once_only()),
    "other_ids_each_time": ("rollouts.redelivered", "comes again", renamed()),
    "never_opens_again": (
        "tasks.reopened",
        "another StreamTasks",
        On("StreamTasks", ask=lose, since=1),
    ),
    "deaf_to_deadlines": ("tasks.deadline", "the TaskResult of", DeafToDeadlines()),
    "sends_garbage": ("calls.valid", "that are no astraflow", On("StreamRollouts", ask=garble)),
    "dies_with_a_task": ("rollouts.accepted", "exit code 9", On("StreamRollouts", ask=die)),
}


def other_tensor(message):
    message.layout.tensors[0].dtype = DTYPE_I32


def cut_layout(message):
    message.layout.tensors[0].shape[:] = [-1]


def opened_to_all(call):
    call.metadata[TRANSFER_KEY] = TOKEN


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


class Endless(Pass):
    """Sends the last chunk again and again."""

    def response(self, call, message):
        return itertools.repeat(message, 50) if is_item_chunk(call, message) else [message]


def is_item_chunk(call, message):
    return call.name == "Pull" and message.HasField("chunk")


class Holds(Pass):
    """Sends a plan, and no chunk of it ever."""

    gate = None

    def begin(self, call):
        if call.name == "Pull" and self.gate is None:
            self.gate = self.tap.held("Pull", is_chunk)
            self.gate.__enter__()


class NewestInstead(Pass):
    """Sends the version that it has, whatever it is asked for."""

    def request(self, call, message):
        if call.name == "Pull":
            message.spec.version = 0
        return [message]


class OneOnly(Pass):
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
    "wrong_dtype": ("weights.layout", "BLAKE3", On("GetLayout", tell=other_tensor)),
    "unsound_layout": ("weights.layout", "not sound", On("GetLayout", tell=cut_layout)),
    "layout_is_garbage": ("weights.layout", "that are no astraflow", On("GetLayout", tell=garble)),
    "layout_is_nothing": ("weights.layout", "without an answer", On("GetLayout", tell=lose)),
    "layout_never_comes": (
        "weights.layout",
        "DEADLINE_EXCEEDED",
        On("GetLayout", ask=lose, since=1),
    ),
    "newest_instead": (
        "weights.unknown_version",
        "in place of VERSION_UNKNOWN",
        NewestInstead(),
    ),
    "pull_fails": ("weights.unknown_version", "INTERNAL", On("Pull", ask=fail, since=1)),
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
    "chunk_twice": ("weights.chunks", "came twice", On("Pull", tell=repeat, wants=is_chunk)),
    "endless": ("weights.chunks", "came twice", Endless()),
    "chunk_of_no_patch": (
        "weights.chunks",
        "which the plan has not",
        On("Pull", tell=put(chunk__patch_index=7), wants=is_chunk),
    ),
    "chunk_of_no_index": (
        "weights.chunks",
        "which the plan has not",
        On("Pull", tell=put(chunk__header__index=7), wants=is_chunk),
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
        On("Pull", ask=clear("spec__have_chunks")),
    ),
    "serves_one_only": ("weights.backpressure", "DEADLINE_EXCEEDED", OneOnly()),
}


def table(role):
    """Return the faults of a role: the check, what it says, and what makes one."""
    own, first = (TRAINERS, "trainer.registered") if role == "trainer" else (RAASES, "raas.joined")
    every = {
        name: (first if check == "{joined}" else check, said, make(JOINS[role]))
        for name, (check, said, make) in MEMBERS.items()
    }
    return every | own


async def play(role, name, hub, token):
    """Be a broken member."""
    *_, fault = table(role)[name]
    if fault is None:
        host, _, port = hub.rpartition(":")
        with socket.create_connection((host, int(port))) as line:
            line.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            await asyncio.Event().wait()
    tap = Breaker(fault)
    await tap.serve("127.0.0.1:0")
    tap.hub = tap.origin = hub
    if role == "trainer":
        await asyncio.to_thread(train_counter, tap.address, token=token)
    else:
        # A task whose rollouts take no time is closed before anybody can cancel it.
        await node_of(tap.address, token, token_s=0.1 * (name == "deaf_to_deadlines")).run()
    await tap.close()
    sys.exit(3 if name == "leaves_with_an_error" else 0)


def node_of(hub, token, *, token_s):
    tokenizer = CharTokenizer()
    with tempfile.TemporaryDirectory() as folder:
        recipe = small_recipe(Path(folder), scorer="exact")
    model = ServedModel(engine=SmallEngine(tokenizer, token_s=token_s), tokenizer=tokenizer)
    return make_node(
        recipe, hub=hub, token=token, name="broken", capacity=16, models={"solver": model}
    )


async def findings(role, name, turn):
    command = f"{sys.executable} {__file__} {role} {name} {{hub}} {{token}}"
    kind = {"trainer": TRAINER, "raas": RAAS}[role]
    async with turn:
        checks = await examine(kind, Terms(command=command, patience_s=PATIENCE_S))
    return first_failed(checks)


def first_failed(checks):
    failed = (check for check in checks.all if check.verdict is Verdict.FAILED)
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
    """Nothing is logged with a traceback, by whomever."""
    yield
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


@pytest.mark.slow
@pytest.mark.parametrize("role", JOINS)
async def test_a_broken_member_fails_the_check_of_the_law_that_it_breaks(role):
    faults, turn = table(role), asyncio.Semaphore(AT_ONCE)
    found = await asyncio.gather(*(findings(role, name, turn) for name in faults))
    require(faults, dict(zip(faults, found, strict=True)))


@pytest.fixture(scope="module")
def source():
    publisher = WeightPublisher(PolicyId("solver"), Layout.of([("w", Dtype.F32, (100,))]))
    info = publisher.publish(0, {"w": np.ones(100, np.float32).view(np.uint32)}, step=0)
    with WeightServer(publisher, lanes=()) as server:
        server.set_transfer_token(TOKEN)
        yield Source(address=server.endpoint, token=TOKEN, told=lambda: info, patience_s=3.0)


async def looked_at(source, fault):
    tap = Breaker(fault)
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
    assert {check.verdict for check in checks.all} == {Verdict.FAILED}


if __name__ == "__main__":
    asyncio.run(play(*sys.argv[1:]))
