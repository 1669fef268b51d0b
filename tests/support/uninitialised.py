"""Uninitialised memory that shows: NaN in every new tensor without values, and in all free memory of the GPU's allocator."""

import torch

# Four bytes of it are NaN in every floating dtype from 16 bits on, and -1 as an integer.
POISON = 0xFF


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


# Bytes of the largest request that is served from small segments.
SMALL = 1 << 20


def free_blocks(segments, device, stream):
    """Bytes of requests that take all the memory which the allocator can give to ``stream`` of ``device``, the largest first.

    ``segments``: by ``torch.cuda.memory_snapshot()``. Graphs have pools of their own, which are left out.
    """
    requests = []
    for segment in segments:
        if (segment["device"], segment["stream"], tuple(segment.get("segment_pool_id", (0, 0)))) != (device, stream, (0, 0)):
            continue
        for size in [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]:
            if segment["segment_type"] == "large":
                # No request reaches a smaller rest of a large segment.
                requests += [size] if size > SMALL else []
            else:
                requests += [SMALL] * (size // SMALL) + ([size % SMALL] if size % SMALL else [])
    return sorted(requests, reverse=True)


def poison_free_memory():
    """Fills all memory that torch's allocator holds free for the current stream; without a GPU, and in a capture, it does nothing.

    ``poisoned`` sees no memory that a kernel's scratch or an extension takes from the allocator.
    """
    if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
    # The allocator serves a request from the smallest block that is large enough.
    taken = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in free_blocks(torch.cuda.memory_snapshot(), device, stream)]
    for block in taken:
        block.fill_(POISON)
