"""Members that break one law in one way each: `python broken.py ROLE FAULT HUB TOKEN`.

Each is a sound member of ours behind a tap, which breaks what passes.
"""

import asyncio
import itertools
import os
import socket
import sys
import tempfile
from pathlib import Path

import numpy as np

from astraflow.conformance.faults import EveryResponse
from astraflow.conformance.tap import Fault, Tap, method_of
from astraflow.raas.policies import ServedModel
from astraflow.rpc.auth import BEARER_KEY, SESSION_KEY, TRANSFER_KEY
from astraflow.testing import CharTokenizer, SmallEngine, small_recipe, train_counter
from astraflow.testing.nodes import make_node
from astraflow_proto.common.v1 import failure_pb2
from astraflow_proto.common.v1.tensor_pb2 import DTYPE_F64
from astraflow_proto.dataflow.v1 import raas_service_pb2, trainer_service_pb2
from astraflow_proto.dataflow.v1.trainer_service_pb2_grpc import TrainerServiceStub
from astraflow_proto.weights.v1 import version_pb2

JOINS = {"trainer": "RegisterTrainer", "raas": "JoinPool"}
# Some faults show when nothing comes for long: what goes on meanwhile goes on slowly. A task that
# takes no time would be closed before anybody can cancel it, too.
STEP_S = 0.3
TOKEN_S = 0.1


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


class On(Fault):
    """Breaks a call of one name.

    Args:
        name: Of the call.
        ask, tell: Change a request or a response in place, or return a list of others.
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
                part = getattr(part, name)
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


class Drainless(Fault):
    """Never hears that it is to go."""

    def response(self, call, message):
        if call.name in ("KeepAlive", "StreamTasks", "StreamBatches"):
            if call.name == "KeepAlive":
                message.ClearField("directive")
            elif message.HasField("directive"):
                return []
        return [message]


class Acks(Fault):
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


class SecondStream(Fault):
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


class AnswersOtherwise(Fault):
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


def each_rollout(change):
    """Return what changes every rollout."""

    def apply(message):
        for item in message.items:
            if item.HasField("rollout"):
                change(item.rollout)

    return On("StreamRollouts", ask=apply)


def array(name, dtype, change):
    """Return what changes an array of every trajectory."""

    def apply(rollout):
        for trajectory in rollout.trajectories:
            tensor = getattr(trajectory, name)
            values = change(np.frombuffer(tensor.data, dtype).copy())
            tensor.data, tensor.shape[:] = values.tobytes(), values.shape

    return each_rollout(apply)


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


class Items(Fault):
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


def counted_as_failed(_, items):
    for item in filter(is_result, items):
        item.result.rollout_count -= 1
        item.result.failures.add(sample_index=1).failure.reason = failure_pb2.REASON_INTERNAL
    return items


def first_samples_lost(_, items):
    return [each for each in items if is_result(each) or each.rollout.sample_index]


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


class DeafToDeadlines(Fault):
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


class GivesBack(Fault):
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


class BreaksTransfers(EveryResponse):
    """Has its own calls to sources pass here."""

    def __init__(self):
        super().__init__("WatchVersions", self.lead)

    def lead(self, message):
        for source in message.version.sources:
            source.endpoint = self.tap.address


class AsksForLanesAsAStranger(BreaksTransfers):
    """Shows no secret where it asks for lanes."""

    def begin(self, call):
        if call.name == "ListLanes":
            call.metadata.pop(TRANSFER_KEY, None)


class TrustsChunks(BreaksTransfers):
    """Goes live on whatever chunk comes: here by mending the one that the kit spoils."""

    is_mended = False

    def response(self, call, message):
        if call.name == "Pull" and message.chunk.payload and not self.is_mended:
            self.is_mended = True
            payload = message.chunk.payload
            message.chunk.payload = bytes([payload[0] ^ 1]) + payload[1:]
        return super().response(call, message)


class StaysBehind(Fault):
    """Samples with the first version that it sees, whatever tasks ask for."""

    first = None

    def response(self, call, message):
        if call.name == "WatchVersions":
            self.first = message.version.version if self.first is None else self.first
            return [message] if message.version.version == self.first else []
        if call.name == "StreamTasks" and message.HasField("task"):
            for bounds in message.task.versions.values():
                bounds.ClearField("min")
        return [message]


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
    "leaves_with_an_error": ("member.drained", "exit code is 3", lambda _: Fault()),
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
    "lanes_without_the_secret": (
        "calls.secrets",
        "ListLanes was refused",
        AsksForLanesAsAStranger(),
    ),
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
    "spans_too_long": ("rollouts.accepted", "do not cover", each_rollout(longer_span)),
    "span_of_the_future": ("rollouts.accepted", "no version", each_rollout(newer_span)),
    "logprobs_are_f64": ("rollouts.accepted", "logprobs", each_rollout(as_doubles)),
    "unknown_task": (
        "rollouts.accepted",
        "no such task",
        each_rollout(put(task_id="task-of-nobody", group_id="group-of-nobody")),
    ),
    "reward_is_nan": ("rollouts.accepted", "reward", each_rollout(put(reward=float("nan")))),
    "stays_at_an_old_version": ("rollouts.accepted", "its task asks for", StaysBehind()),
    "result_does_not_add_up": ("tasks.closed", "its result has", Items(miscounted)),
    "counts_what_it_never_sent": (
        "tasks.closed",
        "has 2 rollouts by its result, 1 came",
        Items(first_samples_lost),
    ),
    "counts_what_it_sent_as_failed": (
        "tasks.closed",
        "by its result, 2 came",
        Items(counted_as_failed),
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
        await asyncio.to_thread(train_counter, tap.address, token=token, step_s=STEP_S)
    else:
        await node_of(tap.address, token).run()
    await tap.close()
    sys.exit(3 if name == "leaves_with_an_error" else 0)


def node_of(hub, token):
    tokenizer = CharTokenizer()
    with tempfile.TemporaryDirectory() as folder:
        recipe = small_recipe(Path(folder), scorer="exact")
    model = ServedModel(engine=SmallEngine(tokenizer, token_s=TOKEN_S), tokenizer=tokenizer)
    return make_node(
        recipe, hub=hub, token=token, name="broken", capacity=16, models={"solver": model}
    )


def main(*words):
    asyncio.run(play(*words))


if __name__ == "__main__":
    main(*sys.argv[1:])
