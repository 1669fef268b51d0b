"""Functions that write down launches in a Plan, called as if they launched."""

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ssta.kernels.lowering.plans import Plan, Planned


def planned(function):
    """``function`` without its first argument, the plan: what it would launch is launched."""
    def run(*arguments, **options):
        tensors, form = tree_flatten(arguments)
        given = [x for x in tensors if isinstance(x, torch.Tensor)]
        plan = Plan(given[0].device, given)
        inputs = iter(plan.inputs)
        function(plan, *tree_unflatten([next(inputs) if isinstance(x, torch.Tensor) else x for x in tensors], form), **options)
        return Planned(plan)(*given)

    return run
