"""The calls of the contract, by their path."""

from dataclasses import dataclass
from functools import cache

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from astraflow_proto.dataflow.v1 import raas_service_pb2, session_service_pb2, trainer_service_pb2
from astraflow_proto.weights.v1 import transfer_service_pb2, version_service_pb2

_FILES = (
    raas_service_pb2,
    session_service_pb2,
    trainer_service_pb2,
    transfer_service_pb2,
    version_service_pb2,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A call of the contract.

    Attributes:
        service: Name of its service, without the package.
        name: Of the call.
        path: As it is called.
        is_unary: One message each way.
        request: Class of what is sent.
        response: Class of what is answered.
    """

    service: str
    name: str
    path: str
    is_unary: bool
    request: type[Message]
    response: type[Message]


def method_of(path: str) -> Method | None:
    """Return the call of a path; None for one that members do not make."""
    return _methods().get(path)


@cache
def _methods() -> dict[str, Method]:
    services = (each for file in _FILES for each in file.DESCRIPTOR.services_by_name.values())
    return {method.path: method for service in services for method in _of_service(service)}


def _of_service(service: ServiceDescriptor) -> list[Method]:
    return [
        Method(
            service=service.name,
            name=method.name,
            path=f"/{service.full_name}/{method.name}",
            is_unary=not (method.client_streaming or method.server_streaming),
            request=GetMessageClass(method.input_type),
            response=GetMessageClass(method.output_type),
        )
        for method in service.methods
    ]
