"""Servicers: convert, one call on the hub, convert."""

from collections.abc import Sequence

from astraflow.dataflow.hub import Hub
from astraflow.dataflow.servicers.members import SessionServicer, VersionServicer
from astraflow.dataflow.servicers.operator import ControlServicer, EvalServicer, LedgerServicer
from astraflow.dataflow.servicers.raas import RaasServicer
from astraflow.dataflow.servicers.trainer import TrainerServicer
from astraflow.rpc.access import Access
from astraflow.rpc.server import Servicer
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


def servicers_of(hub: Hub, access: Access) -> Sequence[Servicer]:
    """Return everything that a hub serves.

    It keeps no weights: TransferService is there to say so with a reason.
    """
    return (
        Servicer(add=add_SessionServiceServicer_to_server, methods=SessionServicer(hub, access)),
        Servicer(add=add_RaasServiceServicer_to_server, methods=RaasServicer(hub, access)),
        Servicer(add=add_TrainerServiceServicer_to_server, methods=TrainerServicer(hub, access)),
        Servicer(add=add_VersionServiceServicer_to_server, methods=VersionServicer(hub, access)),
        Servicer(add=add_EvalServiceServicer_to_server, methods=EvalServicer(hub, access)),
        Servicer(add=add_ControlServiceServicer_to_server, methods=ControlServicer(hub, access)),
        Servicer(add=add_LedgerServiceServicer_to_server, methods=LedgerServicer(hub, access)),
        Servicer(add=add_TransferServiceServicer_to_server, methods=object()),
    )
