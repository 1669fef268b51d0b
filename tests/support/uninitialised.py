"""Uninitialised memory that shows: replacements of what makes tensors without values, which fill them with NaN."""

import torch


def poisoned():
    """(owner, name, replacement) of each function that makes a tensor without values."""
    # Not before: it imports triton, which must not be imported before a test says whether it interprets.
    from torch._dynamo import trace_rules

    # Once in a process torch.compile lists torch's functions by what they are now; those that it meets later it does not trace.
    trace_rules.get_torch_obj_rule_map()

    def poison(make):
        def make_poisoned(*args, **kwargs):
            out = make(*args, **kwargs)
            if out.is_floating_point() or out.is_complex():
                with torch.no_grad():
                    out.fill_(float("nan"))
            return out

        return make_poisoned

    # Through torch.empty, because torch.compile cannot trace the original method once it is wrapped.
    def new_empty(self, *size, dtype=None, device=None, **options):
        return torch.empty(*size, dtype=dtype or self.dtype, device=device or self.device, **options)

    makers = [(torch, name, poison(getattr(torch, name))) for name in ("empty", "empty_like", "empty_strided")]
    return [*makers, (torch.Tensor, "new_empty", new_empty)]
