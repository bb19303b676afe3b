from astraflow_proto.evals.v1 import eval_pb2 as _eval_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateEvalRunRequest(_message.Message):
    __slots__ = ("request_id", "suite", "versions", "pool_share")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SUITE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    POOL_SHARE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    suite: str
    versions: _containers.ScalarMap[str, int]
    pool_share: float
    def __init__(self, request_id: _Optional[str] = ..., suite: _Optional[str] = ..., versions: _Optional[_Mapping[str, int]] = ..., pool_share: _Optional[float] = ...) -> None: ...

class CreateEvalRunResponse(_message.Message):
    __slots__ = ("eval_run",)
    EVAL_RUN_FIELD_NUMBER: _ClassVar[int]
    eval_run: _eval_pb2.EvalRun
    def __init__(self, eval_run: _Optional[_Union[_eval_pb2.EvalRun, _Mapping]] = ...) -> None: ...

class GetEvalRunRequest(_message.Message):
    __slots__ = ("eval_run_id",)
    EVAL_RUN_ID_FIELD_NUMBER: _ClassVar[int]
    eval_run_id: str
    def __init__(self, eval_run_id: _Optional[str] = ...) -> None: ...

class GetEvalRunResponse(_message.Message):
    __slots__ = ("eval_run",)
    EVAL_RUN_FIELD_NUMBER: _ClassVar[int]
    eval_run: _eval_pb2.EvalRun
    def __init__(self, eval_run: _Optional[_Union[_eval_pb2.EvalRun, _Mapping]] = ...) -> None: ...

class WatchEvalRunRequest(_message.Message):
    __slots__ = ("eval_run_id",)
    EVAL_RUN_ID_FIELD_NUMBER: _ClassVar[int]
    eval_run_id: str
    def __init__(self, eval_run_id: _Optional[str] = ...) -> None: ...

class WatchEvalRunResponse(_message.Message):
    __slots__ = ("eval_run",)
    EVAL_RUN_FIELD_NUMBER: _ClassVar[int]
    eval_run: _eval_pb2.EvalRun
    def __init__(self, eval_run: _Optional[_Union[_eval_pb2.EvalRun, _Mapping]] = ...) -> None: ...

class CancelEvalRunRequest(_message.Message):
    __slots__ = ("eval_run_id",)
    EVAL_RUN_ID_FIELD_NUMBER: _ClassVar[int]
    eval_run_id: str
    def __init__(self, eval_run_id: _Optional[str] = ...) -> None: ...

class CancelEvalRunResponse(_message.Message):
    __slots__ = ("eval_run",)
    EVAL_RUN_FIELD_NUMBER: _ClassVar[int]
    eval_run: _eval_pb2.EvalRun
    def __init__(self, eval_run: _Optional[_Union[_eval_pb2.EvalRun, _Mapping]] = ...) -> None: ...

class ListEvalSuitesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListEvalSuitesResponse(_message.Message):
    __slots__ = ("suites",)
    SUITES_FIELD_NUMBER: _ClassVar[int]
    suites: _containers.RepeatedCompositeFieldContainer[_eval_pb2.EvalSuite]
    def __init__(self, suites: _Optional[_Iterable[_Union[_eval_pb2.EvalSuite, _Mapping]]] = ...) -> None: ...
