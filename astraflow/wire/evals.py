"""astraflow.evals.v1: evaluations and suites."""

from astraflow.core.evals import EvalDataSet, EvalResult, EvalRun, EvalState, EvalSuiteInfo
from astraflow.core.ids import EvalRunId, PolicyId, WorkflowId
from astraflow.wire.common import decode_failure, encode_failure
from astraflow.wire.fields import (
    EnumTable,
    decode_time,
    encode_versions,
    optional_time,
    required,
    set_time,
)
from astraflow_proto.evals.v1 import eval_pb2

EVAL_STATES = EnumTable(EvalState, eval_pb2.EvalState, "EVAL_STATE")


def encode_eval_run(run: EvalRun) -> eval_pb2.EvalRun:
    message = eval_pb2.EvalRun(
        eval_run_id=run.eval_run_id,
        suite=run.suite,
        versions=encode_versions(run.versions),
        state=EVAL_STATES.encode(run.state),
        rollout_count=run.rollout_count,
        scored_count=run.scored_count,
        missing_count=run.missing_count,
        results=map(encode_eval_result, run.results),
        overall=None if run.overall is None else encode_eval_result(run.overall),
        failure=None if run.failure is None else encode_failure(run.failure),
    )
    set_time(message.create_time, run.create_time)
    set_time(message.finish_time, run.finish_time)
    return message


def decode_eval_run(message: eval_pb2.EvalRun) -> EvalRun:
    return EvalRun(
        eval_run_id=EvalRunId(required(message.eval_run_id, "eval_run_id")),
        suite=message.suite,
        versions={PolicyId(name): version for name, version in message.versions.items()},
        state=EVAL_STATES.decode(message.state),
        rollout_count=message.rollout_count,
        scored_count=message.scored_count,
        missing_count=message.missing_count,
        results=tuple(map(decode_eval_result, message.results)),
        overall=decode_eval_result(message.overall) if message.HasField("overall") else None,
        failure=decode_failure(message.failure) if message.HasField("failure") else None,
        create_time=decode_time(message.create_time),
        finish_time=optional_time(message, "finish_time"),
    )


def encode_eval_result(result: EvalResult) -> eval_pb2.EvalResult:
    return eval_pb2.EvalResult(**{name: getattr(result, name) for name in EvalResult.__slots__})


def decode_eval_result(message: eval_pb2.EvalResult) -> EvalResult:
    return EvalResult(
        data_set=message.data_set,
        prompt_count=message.prompt_count,
        repeats=message.repeats,
        avg_at_k=message.avg_at_k,
        pass_at_k=dict(message.pass_at_k),
        mean_reward=message.mean_reward,
        missing_count=message.missing_count,
        metrics=dict(message.metrics),
    )


def encode_eval_suite(suite: EvalSuiteInfo) -> eval_pb2.EvalSuite:
    parts = [
        eval_pb2.EvalDataSet(**{name: getattr(part, name) for name in EvalDataSet.__slots__})
        for part in suite.data_sets
    ]
    return eval_pb2.EvalSuite(suite=suite.suite, data_sets=parts, policy_ids=suite.policy_ids)


def decode_eval_suite(message: eval_pb2.EvalSuite) -> EvalSuiteInfo:
    """Read an EvalSuite.

    Raises:
        AstraflowError: INVALID_FIELD without a name.
    """
    parts = [
        EvalDataSet(
            data_set=part.data_set,
            workflow_id=WorkflowId(part.workflow_id),
            prompt_count=part.prompt_count,
            repeats=part.repeats,
            correct_reward=part.correct_reward,
        )
        for part in message.data_sets
    ]
    return EvalSuiteInfo(
        suite=required(message.suite, "suite"),
        data_sets=tuple(parts),
        policy_ids=tuple(map(PolicyId, message.policy_ids)),
    )
