"""What the code of a step may do to tensors of its plan beside looking at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..memo import Unplanned

if TYPE_CHECKING:
    from .plans import Plan


class StepMode(TorchDispatchMode):
    """Sees what a step's code does to tensors of its plan: copies and sums become a part of it, all else but looking at them is refused."""

    WRITES: ClassVar[dict[Any, Callable]] = {torch.ops.aten.copy_.default: Tensor.copy_, torch.ops.aten.add_.Tensor: Tensor.add_}

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = None
        given = [x for part in args for x in (part if isinstance(part, (list, tuple)) else (part,))]
        if any([isinstance(x, Tensor) and self.plan.has(x) for x in given]):
            looks = [of.alias_info is not None and not of.alias_info.is_write for of in function._schema.returns]
            if function is torch.ops.aten.clone.default:
                result = self.plan.known(function(*args, **(kwargs or {})))
                self.plan.call(Tensor.copy_, result, args[0])
            elif function in self.WRITES:
                result = args[0]
                self.plan.call(self.WRITES[function], *args[:2])
            elif not any(looks) and "empty" not in function.name():
                raise Unplanned(f"{function.name()} is computed of a tensor of a plan")
        return function(*args, **(kwargs or {})) if result is None else result
