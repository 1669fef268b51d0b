"""Rows of text as an aligned table, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """One line a row; the first ``left`` columns begin at their left edge, the others, which are numbers, end at their right one."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) if column < left else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths)))
             for row in rows)
    return "\n".join(line.rstrip() for line in lines)
