"""Expert parallelism: each of several ranks has some of a layer's experts, and tokens go to these.

Every rank has rows of its own. What a token takes to its experts, and what they say of it, is
exchanged (all-to-all) by transformers, as its plan of a family has it. So the gradient of an
expert on the rank that has it is that of the tokens of all of them.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Final, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.blocks import require_shareable

# As transformers calls them in its plans: weights cut by experts, and the module that has them.
_WEIGHTS: Final = "grouped_gemm"
_EXPERTS: Final = "ep_dispatch_experts"


class ExpertParallel:
    """This rank among those that share the experts of every layer out."""

    def __init__(self, mesh: DeviceMesh, alone: DeviceMesh) -> None:
        """Take part.

        Args:
            mesh: Of these ranks, of one dimension.
            alone: Of this rank, for nobody else has its rows.
        """
        self._mesh, self._alone = mesh, alone
        self._plan: Mapping[str, str] = {}

    def adopt(self, module: nn.Module, blocks: list[nn.Module]) -> None:
        """Take the plan of a model that is whole, whose blocks `cut` cuts.

        Raises:
            AstraflowError: CAPABILITY_MISSING for a model without experts of which such a plan is
                known, or with a number of them that cannot be shared out.
        """
        _ = _apply_plan()
        config = cast("Any", module).config.get_text_config()
        plan: Mapping[str, str] = getattr(config, "base_model_ep_plan", None) or {}
        self._plan = {name.partition(".*.")[2]: style for name, style in plan.items()}
        why = [each for block in blocks for each in self._unfit(block)]
        if not any(self._experts(block) for block in blocks):
            why = ["it has no experts with a plan in transformers"]
        require_shareable(module, "expert_parallel", self._mesh.size(), why)

    def _unfit(self, block: nn.Module) -> Iterator[str]:
        """Yield what of a block's experts cannot be cut."""
        for path, experts in self._experts(block).items():
            weights: Iterator[tuple[str, Tensor]] = cast("Any", experts).named_parameters()
            for name, weight in weights:
                if (style := self._plan.get(f"{path}.{name}")) != _WEIGHTS:
                    yield f"{path}.{name} is {style or 'without a plan'}"
                elif len(weight) % self._mesh.size():
                    yield f"{len(weight)} experts"

    def _experts(self, block: nn.Module) -> dict[str, nn.Module]:
        """Return the modules of a block that are experts, by their paths."""
        modules: Iterator[tuple[str, nn.Module]] = cast("Any", block).named_modules()
        return {path: each for path, each in modules if self._plan.get(path) == _EXPERTS}

    def cut(self, block: nn.Module) -> list[nn.Module]:
        """Make the experts' weights in a block DTensors, and have tokens go where these lie.

        Returns:
            The modules that have them.
        """
        found = self._experts(block)
        here = {*found, *dict(cast("Any", block).named_parameters())}
        plan = {name: style for name, style in self._plan.items() if name in here}
        _apply_plan()(block, self._mesh, self._alone, plan)
        return [*found.values()]


def _apply_plan() -> Any:
    """Return what of transformers has experts exchange their tokens.

    Raises:
        AstraflowError: CAPABILITY_MISSING.
    """
    try:
        parallel: Any = import_module("transformers.distributed.expert_parallel")
    except ImportError as error:
        raise AstraflowError(
            Reason.CAPABILITY_MISSING,
            f"this transformers shares no experts out for fsdp.expert_parallel ({error}); 5.22 "
            "and later do: install one of these, or take 1",
        ) from error
    return parallel.apply_expert_parallelism
