"""Lets torchvision of PyPI, which is linked with CUDA, be imported beside torch for CPUs.

Its compiled part cannot load there, and the import fails where two operators of it are given
shapes. They are declared just before; nothing calls them for models of text.

Checksums of weights wait for a GPU in releases up to 0.5.22, whatever the device: here they do not.
"""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _Declare(MetaPathFinder):
    """Finds nothing itself."""

    library: Any = None

    def find_spec(self, fullname: str, *_args: object) -> None:
        """Declare the operators at the first import of torchvision."""
        if fullname != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch  # noqa: PLC0415 - most processes never come here

        # Held: operators end with the library that declared them.
        _Declare.library = torch.library.Library("torchvision", "DEF")
        for operator in _OPERATORS:
            _Declare.library.define(operator)
        torch.cuda.synchronize = _wait_for_nothing


def _wait_for_nothing(_device: object = None) -> None: ...


sys.meta_path.insert(0, _Declare())
