"""What layers ran on the ranks of a comparison, put together: a report is of one rank's heads, and a result of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssta.report import heads_without_estimate, mass_summary

from ..patch.apply import SSTAHandle
from ..patch.report import LayerRun, RunReport


@dataclass(frozen=True)
class RankReport:
    """One rank's: its report, for each layer there its ``SSTAProcessor.exact_mass``, and the kernels of its dense steps."""

    report: RunReport
    masses: tuple[Tensor | None, ...]
    dense_kernels: tuple[str, ...]

    @classmethod
    def of(cls, handle: SSTAHandle, dense_kernels: Iterable[str]) -> RankReport:
        report = handle.report()
        masses = {f"{name}.{site}" if name else site: processor.exact_mass
                  for name, _, _, processors in handle.layers() for site, processor in processors}
        return cls(report, tuple([masses[run.layer] for run in report]), tuple(dense_kernels))


def whole_report(parts: Sequence[RankReport]) -> RunReport:
    """The first rank's report, with the densities and the exact mass of all ranks' heads."""
    if len(parts) == 1:
        return parts[0].report
    runs = []
    for index, first in enumerate(parts[0].report):
        layer = [part.report[index] for part in parts]
        masses = [mass for part in parts if (mass := part.masses[index]) is not None]
        runs.append(replace(
            first, density=_over_heads(layer, [run.density for run in layer]),
            exact_mass=mass_summary(torch.cat(masses, dim=1)) if masses else None,
            without_estimate=heads_without_estimate(torch.cat(masses, dim=1)) if masses else None))
    return RunReport(runs, parts[0].report.models)


def _over_heads(layer: Sequence[LayerRun], values: Sequence[float]) -> float:
    """The mean of what each rank has for its own heads. Ranks of one ring, which have the same heads, are as many for every head."""
    heads = [run.own_heads or 0 for run in layer]
    return sum(count * value for count, value in zip(heads, values)) / sum(heads)


def exact_mass(report: RunReport) -> tuple[float, float, float] | None:
    """``Measurement.exact_mass`` of a report."""
    masses = [run.exact_mass for run in report if run.exact_mass is not None]
    if not masses:
        return None
    mean, fifth, worst = zip(*masses)
    return sum(mean) / len(mean), min(fifth), min(worst)


def without_estimate(report: RunReport) -> float | None:
    """``Measurement.without_estimate`` of a report."""
    heads = [run.without_estimate for run in report if run.without_estimate is not None]
    return sum(without for without, _ in heads) / sum(of for _, of in heads) if heads else None
