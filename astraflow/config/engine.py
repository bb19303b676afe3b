"""The inference engine of a recipe."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from astraflow.config.strict import Strict

_OF_SERVERS = (
    *("python", "url", "args", "tensor_parallel", "memory", "cache_gib", "start_s"),
    "routed_experts",
)


class Engine(Strict):
    """The inference engine of a RaaS, one per policy, or per model that several policies adapt."""

    kind: Literal["embedded", "vllm", "sglang"] = "embedded"
    """embedded: in the node's own process, for small models. vllm, sglang: a server that the node
    starts and supervises, or attaches to; see engines.md."""
    max_batch: int = Field(default=128, ge=1)
    """Sequences decoded together."""
    max_context: int | None = Field(default=None, ge=1)
    """Tokens of prompt and completion; unset: the model's own limit."""
    device: str = "auto"
    """auto, cpu or cuda[:N]. Servers with auto are spread over the GPUs that the node sees."""
    dtype: Literal["f32", "bf16"] = "f32"
    """Of the computation."""
    thread_count: int = Field(default=1, ge=1)
    """CPU threads for torch."""
    kv: Literal["keep", "recompute"] = "keep"
    """What a new version does to the cache of running generations: nothing, or they are read
    anew with the new weights before they go on; trajectories say which it was."""
    python: Path | None = None
    """Servers: interpreter of the environment that the server is installed in; unset: what
    ASTRAFLOW_VLLM_PYTHON or ASTRAFLOW_SGLANG_PYTHON says."""
    url: str | None = None
    """Servers: attach to one that runs on this host already, such as http://127.0.0.1:8000, in
    place of starting one."""
    args: tuple[str, ...] = ()
    """Servers: further arguments of the command that starts it."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Servers: GPUs that share one copy of the model."""
    memory: float | None = Field(default=None, gt=0, le=1)
    """Servers: share of a GPU's memory for weights and cache; unset: the server's own, or an equal
    part of .9 where servers of several policies share it."""
    cache_gib: float = Field(default=1.0, gt=0)
    """Servers on a CPU: GiB for keys and values."""
    routed_experts: bool = False
    """Servers on GPUs: they tell which experts every token went through, for mixtures of experts
    that are trained with router replay. The embedded engine always does."""
    start_s: float = Field(default=600.0, gt=0)
    """Servers: seconds that a start may take until the first token."""

    @model_validator(mode="after")
    def _keys_fit_the_kind(self) -> Self:
        fields = type(self).model_fields
        strange = [name for name in _OF_SERVERS if getattr(self, name) != fields[name].default]
        if self.kind == "embedded" and strange:
            raise ValueError(f"{strange[0]} is for kind vllm or sglang; the engine is embedded")
        if self.url is not None and self.python is not None:
            raise ValueError("url attaches to a server and python starts one: give one of them")
        return self
