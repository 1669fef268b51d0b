"""Benchmarks on several ranks: as torchrun starts them, but forked as other ranks of tests are, with their CSVs in a folder of the test."""

import contextlib
import importlib
import io
import os
from pathlib import Path

import torch.distributed as dist
from ranks import on_ranks, values_of


def measured(name: str, ranks: int, folder: Path, *arguments: str) -> list[str]:
    """What each rank prints."""
    # torchrun has one, too, of which ranks learn as they do here.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return values_of(on_ranks(_measure, ranks, name, folder, store.port, arguments, backend=None))


def _measure(rank: int, ranks: int, name: str, folder: Path, port: int, arguments: tuple[str, ...]) -> str:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    bench = importlib.import_module(name)
    bench.RESULTS = folder
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        bench.main([*arguments])
    return printed.getvalue()
