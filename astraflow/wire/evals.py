"""astraflow.evals.v1: evaluations and suites."""

from astraflow.core.evals import EvalResult, EvalRun, EvalSuiteInfo
from astraflow.core.events import EvalCreated
from astraflow.wire.converters import converter
from astraflow.wire.fields import required
from astraflow_proto.evals.v1 import eval_pb2, eval_service_pb2

encode_eval_result, decode_eval_result = converter(EvalResult, eval_pb2.EvalResult)

encode_eval_run, decode_eval_run = converter(EvalRun, eval_pb2.EvalRun, eval_run_id=required)

encode_eval_suite, decode_eval_suite = converter(EvalSuiteInfo, eval_pb2.EvalSuite, suite=required)

encode_eval_created, decode_eval_created = converter(
    EvalCreated, eval_service_pb2.CreateEvalRunRequest, request_id=required
)
