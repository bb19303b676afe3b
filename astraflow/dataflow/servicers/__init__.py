"""Servicers: convert, one call on the hub, convert."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from astraflow.core.errors import AstraflowError, Reason
from astraflow.dataflow.hub import Hub
from astraflow.dataflow.servicers.members import MemberServicer
from astraflow.dataflow.servicers.operator import OperatorServicer
from astraflow.rpc.access import Access
from astraflow.rpc.server import Servicer, takes_bytes
from astraflow_proto.control.v1.control_service_pb2_grpc import add_ControlServiceServicer_to_server
from astraflow_proto.control.v1.ledger_service_pb2_grpc import add_LedgerServiceServicer_to_server
from astraflow_proto.dataflow.v1.raas_service_pb2_grpc import add_RaasServiceServicer_to_server
from astraflow_proto.dataflow.v1.session_service_pb2_grpc import (
    add_SessionServiceServicer_to_server,
)
from astraflow_proto.dataflow.v1.trainer_service_pb2_grpc import (
    add_TrainerServiceServicer_to_server,
)
from astraflow_proto.evals.v1.eval_service_pb2_grpc import add_EvalServiceServicer_to_server
from astraflow_proto.weights.v1.transfer_service_pb2_grpc import (
    add_TransferServiceServicer_to_server,
)
from astraflow_proto.weights.v1.version_service_pb2_grpc import add_VersionServiceServicer_to_server


class Recovery:
    """Answers every call of a hub that replays its journal: come again, so much is done."""

    def __init__(self) -> None:
        self._share = 0.0

    @property
    def servicers(self) -> Sequence[Servicer]:
        """Itself, as every service of a hub."""
        return [
            Servicer(add=add, methods=self) for add in (*_OF_MEMBERS, *_OF_OPERATORS, *_OF_NOBODY)
        ]

    def note(self, share: float) -> None:
        self._share = share

    def __getattr__(self, name: str) -> Callable[[object, object], Awaitable[None]]:
        @takes_bytes
        async def refuse(request: object, context: object) -> None:
            del request, context
            percent = f"{100 * self._share:.0f}"
            raise AstraflowError(
                Reason.NOT_READY,
                f"the hub is recovering, {percent} %",
                retryable=True,
                metadata={"recovered_percent": percent},
            )

        return refuse


def servicers_of(hub: Hub, access: Access) -> Sequence[Servicer]:
    """Return everything that a hub serves.

    It keeps no weights: TransferService is there to say so with a reason.
    """
    served = (
        (MemberServicer(hub, access), _OF_MEMBERS),
        (OperatorServicer(hub, access), _OF_OPERATORS),
        (object(), _OF_NOBODY),
    )
    return [Servicer(add=add, methods=methods) for methods, adds in served for add in adds]


_OF_MEMBERS: Sequence[Callable[[Any, Any], None]] = (
    add_SessionServiceServicer_to_server,
    add_RaasServiceServicer_to_server,
    add_TrainerServiceServicer_to_server,
    add_VersionServiceServicer_to_server,
)
_OF_OPERATORS: Sequence[Callable[[Any, Any], None]] = (
    add_EvalServiceServicer_to_server,
    add_ControlServiceServicer_to_server,
    add_LedgerServiceServicer_to_server,
)
_OF_NOBODY = (add_TransferServiceServicer_to_server,)
