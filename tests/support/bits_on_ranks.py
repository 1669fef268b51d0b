"""What a rank answers in tests of bits.py."""

from __future__ import annotations

import torch.distributed as dist
from bits_side import Side, reference


def answers(rank: int, ranks: int, specs: list[dict]) -> list[tuple[dict, dict[str, float]]]:
    """For each spec the answer of the side, and on the first rank how far every result is from float64."""
    side = Side("cpu", dist.group.WORLD, dist.new_group(backend="gloo"))
    lines = side.run(specs)
    far: list[dict[str, float]] = []
    for spec, results in zip(specs, side.results):
        exact = reference(spec, "cpu")[0] if rank == 0 and isinstance(results, dict) else {}
        far.append({name: float((results[name] - x).abs().max() / x.abs().max()) for name, x in exact.items()})
    return list(zip(lines, far))
