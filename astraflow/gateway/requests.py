"""What requests say, field by field, and what the page at /docs says beside it."""

from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from astraflow.core.errors import AstraflowError
from astraflow.gateway.edge.bodies import JSON, PICKLE, SAFETENSORS
from astraflow.rpc.address import join_address, split_address


def _is_endpoint(value: str) -> str:
    try:
        return join_address(*_dialled(*split_address(value)))
    except AstraflowError:
        raise ValueError("it is not host:port") from None


def _is_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or parts.query or parts.fragment or parts.username:
        raise ValueError("it is not http://host:port")
    _dialled(parts.hostname or "", 1 if parts.port is None else parts.port)
    return value


def _dialled(host: str, port: int) -> tuple[str, int]:
    if (
        not port
        or not host
        or not host.isascii()
        or not host.isprintable()
        or set(host) & set(" /@\\")
    ):
        raise ValueError("it names no host and port")
    return host, port


Endpoint = Annotated[str, Field(max_length=300), AfterValidator(_is_endpoint)]
Url = Annotated[str, Field(max_length=300), AfterValidator(_is_url)]
Version = Annotated[int, Field(ge=0, lt=1 << 53)]


class Fields(BaseModel):
    """Of a request; unknown ones are refused, so that a misspelt one is not ignored."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Ready(Fields):
    """A trainer joins the run."""

    train_batch_size: int | None = Field(default=None, ge=1, description="Sequences per batch.")
    model_id: str | None = Field(default=None, description="Its policy; unset: the only one.")
    sender_endpoint: Endpoint | None = Field(default=None, description="host:port of its weights.")
    recovered_version: Version | None = Field(
        default=None, description="Version of the weights that it comes back with."
    )


class NotifyVersion(Fields):
    """A trainer has new weights."""

    version: Version = Field(description="The trainer's own number, one more than the last.")
    run_eval: bool = Field(
        default=False, description="Whether to wait for the recipe's evaluations of it."
    )
    model_id: str | None = Field(default=None, description="Its policy; unset: the only one.")


class LoadVersion(Fields):
    """A trainer has new weights, which a RaaS is to fetch."""

    version: Version = Field(description="The trainer's own number.")
    sender_endpoint: Endpoint = Field(description="host:port of its weights.")
    model_id: str | None = Field(default=None, description="The policy; unset: the only one.")


class RegisterRaas(Fields):
    """A RaaS that speaks HTTP joins the pool."""

    uid: str = Field(min_length=1, max_length=200, description="Its name in the pool.")
    raas_url: Url = Field(description="Where it is called.")
    gpu_count: int | None = Field(
        default=None, ge=0, lt=1 << 20, description="For the pool's tables."
    )


class DeregisterRaas(Fields):
    """A RaaS leaves the pool."""

    uid: str = Field(min_length=1, max_length=200, description="Its name in the pool.")
    shutdown: bool = Field(default=False, description="Whether to POST /shutdown to it.")


_ERROR: Final = {
    "content": {
        JSON: {
            "schema": {
                "type": "object",
                "properties": {
                    "error": {"type": "string", "description": "What to do about it."},
                    "reason": {"type": "string", "description": "The run's reason, if it is one."},
                },
            }
        }
    }
}

ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "Without Accept a pickled dict, as published.",
        "content": {PICKLE: {}, JSON: {}, SAFETENSORS: {}},
    },
    413: {"description": "The body is too large.", **_ERROR},
    415: {"description": "Pickled bodies are not read here, or the type is unknown.", **_ERROR},
    422: {"description": "A field is wrong.", **_ERROR},
}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a body that is read by hand."""
    schema = {"schema": model.model_json_schema()}
    return {"requestBody": {"content": {JSON: schema, PICKLE: schema}}}
