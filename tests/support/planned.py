"""Functions that write down launches in a Plan, called as if they launched."""

import torch

from ssta.kernels.lowering.plans import Plan, Planned


def planned(function):
    """``function`` without its first argument, the plan: what it would launch is launched."""
    def run(*arguments, **options):
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        plan = Plan(tensors[0].device, tensors)
        inputs = iter(plan.inputs)
        function(plan, *[next(inputs) if isinstance(x, torch.Tensor) else x for x in arguments], **options)
        return Planned(plan)(*tensors)

    return run
