"""What the OpenAPI page says beside the docstrings."""

from typing import Any, Final

from pydantic import BaseModel

from astraflow.gateway.edge.bodies import JSON, PICKLE, SAFETENSORS

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
