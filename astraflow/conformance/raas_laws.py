"""What a RaaS does at all times, whatever the script is at."""

from collections import Counter

from astraflow.conformance.rollout_record import id_of, items, nacks, results, tasks
from astraflow.conformance.session_checks import laws_of_sessions
from astraflow.conformance.stage import Law
from astraflow.conformance.tap import Tap
from astraflow.core.errors import Reason
from astraflow_proto.common.v1 import failure_pb2
from astraflow_proto.dataflow.v1 import raas_service_pb2 as pb
from astraflow_proto.weights.v1 import version_pb2


def laws_of(join: str) -> dict[str, Law]:
    """Return what must hold all the time, once `join` let the member in."""
    return {
        "rollouts.accepted": _none_is_rejected,
        "rollouts.backpressure": _nothing_comes_twice,
        "tasks.credit": _is_within_credit,
        "tasks.closed": _results_close,
        "versions.reported": _versions_rise,
        **laws_of_sessions(join),
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


def _none_is_rejected(tap: Tap) -> str | None:
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
    return _results_add_up(tap)


def _results_add_up(tap: Tap) -> str | None:
    sample_counts = {task.task_id: len(task.sample_indexes) for task in tasks(tap)}
    for result in results(tap):
        wanted = sample_counts.get(result.task_id)
        found = result.rollout_count + len(result.failures)
        if wanted is not None and found != wanted:
            return f"{result.task_id} asked for {wanted} samples, its result has {found}"
    return None
