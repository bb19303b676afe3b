"""The script for a RaaS: a real run gives it tasks, a source that lies once its weights."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

from astraflow.conformance.checks import Broken, ContractCheck
from astraflow.conformance.faults import EveryResponse, FirstResponse
from astraflow.conformance.session_checks import (
    EVERY_MEMBERS,
    check_drain,
    check_keep_alive,
    check_resume,
    laws_of_sessions,
)
from astraflow.conformance.stage import Law, Stage, first_of
from astraflow.conformance.tap import Call, Fault, Tap
from astraflow.core.errors import AstraflowError, Reason
from astraflow.storage.weight_files import flatten, read_weights
from astraflow.testing.trainer import flickering, train_counter
from astraflow_proto.common.v1 import failure_pb2, session_pb2
from astraflow_proto.dataflow.v1 import raas_service_pb2 as pb
from astraflow_proto.weights.v1 import version_pb2


def items(call: Call) -> list[Any]:
    return [item for message in call.requests for item in message.items]


def id_of(item: Any) -> str:
    """Return the id under which an item is acknowledged."""
    return item.rollout.rollout_id if item.HasField("rollout") else item.result.task_id


def results(tap: Tap) -> list[Any]:
    """Return the results of tasks that the member sent."""
    sent = [item for call in tap.of("StreamRollouts") for item in items(call)]
    return [item.result for item in sent if item.HasField("result")]


def _rollouts(tap: Tap) -> list[Any]:
    sent = [item for call in tap.of("StreamRollouts") for item in items(call)]
    return [item.rollout for item in sent if item.HasField("rollout")]


def tasks(tap: Tap) -> list[Any]:
    """Return the tasks that reached the member, also on streams of which no request has come."""
    streams = (call for call in tap.calls if call.name == "StreamTasks")
    events = [event for call in streams for event in call.responses]
    return [event.task for event in events if event.HasField("task")]


def nacks(tap: Tap) -> list[Any]:
    """Return the tasks that the member gave back."""
    asked = [message for call in tap.of("StreamTasks") for message in call.requests]
    return [message.nack for message in asked if message.HasField("nack")]


def laws() -> dict[str, Law]:
    """Return what must hold all the time, once the member was let in."""
    return {
        "rollouts.accepted": _are_sound,
        "rollouts.backpressure": _nothing_comes_twice,
        "tasks.credit": _is_within_credit,
        "tasks.closed": _results_close,
        "versions.reported": _versions_rise,
        **laws_of_sessions(JOIN),
    }


def _versions_rise(tap: Tap) -> str | None:
    newest: dict[str, int] = {}
    for call in tap.of("ReportVersion"):
        report = call.requests[0]
        if call.reason is Reason.VERSION_UNKNOWN:
            return f"it reported version {report.version}, which was never published"
        if report.state == version_pb2.VERSION_STATE_LIVE:
            before = newest.setdefault(report.policy_id, report.version)
            if report.version < before:
                return f"it reported version {report.version} LIVE, and {before} before that"
            newest[report.policy_id] = report.version
    return None


def _are_sound(tap: Tap) -> str | None:
    return _fits_no_task(tap) or _rejected(tap)


def _fits_no_task(tap: Tap) -> str | None:
    """Look at what was sent itself: a result may come before the hub has answered."""
    given = {task.task_id: task for task in tasks(tap)}
    for rollout in _rollouts(tap):
        task = given.get(rollout.task_id)
        if task is None:
            return f"{rollout.rollout_id} is of {rollout.task_id}: it was given no such task"
        for trajectory in rollout.trajectories:
            bounds = task.versions.get(trajectory.policy_id)
            wanted = 0 if bounds is None else bounds.min
            found = min((span.version for span in trajectory.version_spans), default=wanted)
            if found < wanted:
                return (
                    f"{rollout.rollout_id} was sampled with version {found}, and its task asks for"
                    f" {wanted} or a newer one"
                )
    return None


def _rejected(tap: Tap) -> str | None:
    for call in tap.of("StreamRollouts"):
        for ack in (ack for message in call.responses for ack in message.acks):
            if ack.disposition == pb.DISPOSITION_REJECTED:
                reason = failure_pb2.Reason.Name(ack.reason)
                return f"{ack.item_id} was rejected: {ack.message} [{reason}]"
    return None


def _nothing_comes_twice(tap: Tap) -> str | None:
    for call in tap.of("StreamRollouts"):
        ((item_id, count),) = Counter(map(id_of, items(call))).most_common(1) or [("", 0)]
        if count > 1:
            return f"{item_id} came {count} times on one stream"
    return None


def _is_within_credit(tap: Tap) -> str | None:
    for call in tap.of("StreamTasks"):
        if call.requests and not call.requests[0].HasField("open"):
            return "the first message on StreamTasks is not open"
    nacked = [nack.failure.reason for nack in nacks(tap)]
    if failure_pb2.REASON_CAPACITY_EXCEEDED in nacked or failure_pb2.REASON_OVERLOADED in nacked:
        return "it gave a task back that its own credit had asked for"
    return None


def _results_close(tap: Tap) -> str | None:
    nacked = {nack.task_id for nack in nacks(tap)}
    for call in tap.of("StreamRollouts"):
        closed: set[str] = set()
        for item in items(call):
            if item.HasField("result"):
                closed.add(item.result.task_id)
            elif item.rollout.task_id in closed:
                return f"{id_of(item)} came behind the TaskResult of {item.rollout.task_id}"
        if given_back := closed & nacked:
            return f"a TaskResult came of {min(given_back)}, which it had given back by a TaskNack"
    sample_counts = {task.task_id: len(task.sample_indexes) for task in tasks(tap)}
    samples = defaultdict[str, set[int]](set)
    for rollout in _rollouts(tap):
        samples[rollout.task_id].add(rollout.sample_index)
    for result in results(tap):
        wanted = sample_counts.get(result.task_id)
        found = result.rollout_count + len(result.failures)
        if wanted is not None and found != wanted:
            return f"{result.task_id} asked for {wanted} samples, its result has {found}"
        sent = len(samples[result.task_id])
        if sent != result.rollout_count:
            return (
                f"{result.task_id} has {result.rollout_count} rollouts by its result, {sent} came"
            )
    return None


JOIN: Final = "JoinPool"

# The record grows with every rollout, and is looked through at every message.
_STEP_S: Final = 0.1
_SERVICE: Final = "dataflow/v1/raas_service.proto, "

CHECKS: Final = (
    ContractCheck(
        name="raas.joined",
        expected="joins with contract_version, a name, a capacity and the policy of the run",
        source=_SERVICE + "JoinPoolRequest",
    ),
    ContractCheck(
        name="weights.corrupt_chunk",
        expected="takes no chunk of another digest: pulls again, and goes live with what verified",
        source="weights/v1/patch.proto, Chunk; docs/weights.md, When something is wrong",
    ),
    ContractCheck(
        name="versions.reported",
        expected="reports a published version VERSION_STATE_LIVE once tokens are sampled with it,"
        " and none below it after that",
        source="weights/v1/version_service.proto, ReportVersion",
    ),
    ContractCheck(
        name="tasks.credit",
        expected="opens StreamTasks with its credit, and takes no more than that",
        source=_SERVICE + "TaskOpen, TaskCredit",
    ),
    ContractCheck(
        name="rollouts.accepted",
        expected="sends rollouts that are sound: none is answered with DISPOSITION_REJECTED, or was"
        " sampled with an older version than its task asks for",
        source="rollout/v1/rollout.proto, Rollout; rollout/v1/trajectory.proto, Trajectory;"
        " rollout/v1/task.proto, RolloutTask.versions",
    ),
    ContractCheck(
        name="tasks.closed",
        expected="closes a task that it did not give back with a TaskResult behind all of its"
        " rollouts, whose numbers add up",
        source=_SERVICE + "StreamRolloutsRequest; rollout/v1/rollout.proto, TaskResult",
    ),
    ContractCheck(
        name="rollouts.backpressure",
        expected="sends nothing twice on one stream while acks are late, and stays alive",
        source=_SERVICE + "StreamRollouts: sent again on the next stream",
    ),
    ContractCheck(
        name="rollouts.redelivered",
        expected="sends what was not acknowledged again on the next stream, under the same ids",
        source=_SERVICE + "StreamRollouts",
    ),
    ContractCheck(
        name="tasks.reopened",
        expected="opens a StreamTasks again that was cut, and goes on with what it holds",
        source=_SERVICE + "StreamTasks",
    ),
    ContractCheck(
        name="tasks.recovered",
        expected="has the run find what a cut StreamTasks swallowed: JoinPool with SessionResume,"
        " which lists the tasks that it has and no other",
        source=_SERVICE + "StreamTasks",
    ),
    ContractCheck(
        name="tasks.deadline",
        expected="closes a task that is cancelled because its deadline passed: its TaskResult is"
        " still due",
        source=_SERVICE + "TaskCancellation; rollout/v1/task.proto, RolloutTask.deadline",
    ),
    *EVERY_MEMBERS,
)


async def set_up(stage: Stage) -> None:
    """Bring the trainer, and lead the member to its weights through the tap."""
    weights = None
    if stage.model is not None:
        tensors = read_weights(stage.model)
        arrays = {name: each.bits for name, each in tensors.items()}
        weights = flickering(flatten(tensors)[0], arrays)

    def train_to_the_end() -> None:
        try:
            train_counter(
                stage.run.address,
                token=stage.run.join_token,
                loop=stage.run.loop,
                weights=weights,
                step_s=_STEP_S,
            )
        except AstraflowError:
            # Who looks at a member that ended at once ends the run while its trainer registers.
            if not stage.tap.is_closed:
                raise

    stage.run.add_thread(train_to_the_end)
    stage.tap.faults += _guides(stage.tap)


def _guides(tap: Tap) -> list[Fault]:
    def lead(sources: Iterable[version_pb2.Source]) -> None:
        for source in sources:
            tap.origin, source.endpoint = source.endpoint, tap.address

    def refuse(_: Any) -> None:
        raise AstraflowError(Reason.LANE_UNAVAILABLE, "weights come over gRPC here")

    return [
        EveryResponse("ListLanes", refuse),
        EveryResponse("WatchVersions", lambda message: lead(message.version.sources)),
        EveryResponse("ListSources", lambda message: lead(message.sources)),
        EveryResponse("ListVersions", lambda message: [lead(v.sources) for v in message.versions]),
    ]


async def play(stage: Stage) -> None:
    """Go through all checks, one after the other."""
    lie = FirstResponse("Pull", lambda message: message.chunk.payload, change=_corrupted)
    stage.tap.faults.append(lie)
    with stage.check("raas.joined"):
        request = (await stage.joined(JOIN)).requests[0]
        if request.capacity < 1:
            raise Broken(f"capacity is {request.capacity}: it would get no task")
    with stage.check("weights.corrupt_chunk"):
        wrong = await stage.until(lambda: lie.call, "a Pull of the version")
        await stage.until(
            lambda: first_of(stage.tap.of("Pull", after=wrong)) or _live(stage.tap),
            "another Pull after a chunk with wrong bytes",
        )
        if not stage.tap.of("Pull", after=wrong):
            version = wrong.requests[0].spec.version
            raise Broken(f"version {version} went live on bytes that have another digest")
    with stage.check("versions.reported"):
        await stage.until(lambda: _live(stage.tap), "a ReportVersion with VERSION_STATE_LIVE")
    with stage.check("tasks.credit"):
        await stage.call("StreamTasks", "a StreamTasks that tasks can be sent on")
    with stage.check("rollouts.accepted"):
        await stage.call("StreamRollouts", "a rollout")
    with stage.check("tasks.closed"):
        await stage.until(lambda: first_of(results(stage.tap)), "the TaskResult of a task")
    with stage.check("rollouts.backpressure"), stage.tap.held("StreamRollouts"):
        count = len(stage.tap.of("KeepAlive"))
        await stage.call("KeepAlive", "KeepAlive while acks are late", after=count + 1)
    await _check_lost_acks(stage)
    await _check_cut_tasks(stage)
    await _check_deadline(stage)
    await check_resume(stage, JOIN)
    await check_keep_alive(stage)
    await check_drain(stage, JOIN)


def _corrupted(message: Any) -> Sequence[Any]:
    other = type(message)()
    other.CopyFrom(message)
    other.chunk.payload = bytes([message.chunk.payload[0] ^ 1]) + message.chunk.payload[1:]
    return [other]


def _live(tap: Tap) -> Call | None:
    live = version_pb2.VERSION_STATE_LIVE
    return first_of(call for call in tap.of("ReportVersion") if call.requests[0].state == live)


async def _check_lost_acks(stage: Stage) -> None:
    with stage.check("rollouts.redelivered"):
        fault = FirstResponse("StreamRollouts")
        stage.tap.faults.append(fault)
        lost = {ack.item_id for ack in (await stage.until(lambda: fault.message, "rollouts")).acks}

        def is_sent() -> bool | None:
            later = stage.tap.of("StreamRollouts", after=fault.call)
            return lost <= {id_of(item) for call in later for item in items(call)} or None

        what = f"a new StreamRollouts, on which {', '.join(sorted(lost))} comes again"
        await stage.until(is_sent, what)


async def _check_cut_tasks(stage: Stage) -> None:
    fault = FirstResponse("StreamTasks", _has_task)
    count, joined = len(stage.tap.of("StreamTasks")), len(stage.tap.of(JOIN))
    with stage.check("tasks.reopened"):
        stage.tap.faults.append(fault)
        lost = (await stage.until(lambda: fault.message, "a task")).task
        await stage.call("StreamTasks", "another StreamTasks, and tasks on it", after=count)
    with stage.check("tasks.recovered"):

        def resumed() -> session_pb2.SessionResume | None:
            requests = (call.requests[0] for call in stage.tap.of(JOIN)[joined:])
            return first_of(each.resume for each in requests if each.HasField("resume"))

        resume = await stage.until(
            resumed, "a JoinPool with SessionResume after StreamTasks was cut"
        )
        if lost.task_id in resume.held_task_ids:
            raise Broken(f"it holds {lost.task_id}, which never came to it")


async def _check_deadline(stage: Stage) -> None:
    with stage.check("tasks.deadline"):
        fault = FirstResponse("StreamTasks", _has_task, change=_with_cancellation)
        stage.tap.faults.append(fault)
        task = (await stage.until(lambda: fault.message, "another task")).task

        def is_closed() -> bool | None:
            ended = [*results(stage.tap), *nacks(stage.tap)]
            return any(each.task_id == task.task_id for each in ended) or None

        await stage.until(is_closed, f"the TaskResult of {task.task_id}")


def _has_task(message: Any) -> bool:
    return message.HasField("task")


def _with_cancellation(message: Any) -> Sequence[Any]:
    cancellation = pb.TaskCancellation(
        task_id=message.task.task_id, reason=pb.CANCEL_REASON_DEADLINE
    )
    return [message, pb.StreamTasksResponse(cancellation=cancellation)]
