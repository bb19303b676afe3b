"""What all parts of a recipe are made of."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]
Finite = Annotated[float, Field(le=1e38, allow_inf_nan=False)]
"""That an f32 holds, too."""
Seconds = Annotated[float, Field(le=1e9)]
"""That are added to a time of day: thirty years, and no infinity, for whoever wants no limit."""
Count = Annotated[int, Field(le=10**9)]
"""Of whatever there may be many of; a billion is no limit, for whoever wants none."""
Nbytes = Annotated[int, Field(le=2**62)]
Options = dict[str, Any]
LaneChoice = Literal["auto"] | tuple[Literal["grpc", "tcp", "shm", "ucx"], ...]


class Strict(BaseModel):
    """Base of all parts: unknown keys fail, values do not change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Named(Strict):
    """Code by its name, which alone will do where it needs no options."""

    name: str
    options: Options = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _named_only(cls, said: Any) -> Any:
        return {"name": said} if isinstance(said, str) else said


class Algorithm(Named):
    """A data algorithm; its name alone will do where it needs no options. See algorithms.md."""

    name: str
    """Built in, an entry point of an installed package, or module:Class."""
    options: Options = Field(default={})
    """Checked by the algorithm when the hub starts."""


class OwnEngine(Named):
    """Steps a model in place of the built-in trainer. See trainers.md."""

    name: str = Field(pattern=r"^[^:]+:[^:]+$")
    """module:factory; called for a train engine where the trainer runs, which finds modules in its
    working directory and on PYTHONPATH."""
    options: Options = Field(default={})
    """Keywords that the factory is called with."""
