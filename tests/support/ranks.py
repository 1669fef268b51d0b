"""on_ranks: a function on several processes, gloo's or with a GPU each NCCL's, and what each returned or raised; none waits for good."""

import datetime
import os
import queue
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hanging import HANG
from uninitialised import poisoned

# A rank that raised leaves the others in a collective: so long they are waited for.
GRACE = 5
# What cases import takes as long as they do: one process does it, and others are forked from it. A fork cannot use CUDA with certainty.
IMPORTED = ["parallel_cases", "rank_cases", "rank_ground"]


@dataclass(frozen=True)
class Outcome:
    """What a rank returned, or what it raised: the exception's type by name, its text and its traceback."""

    value: object = None
    error: str | None = None
    message: str = ""
    trace: str = ""


def _rank(function, rank, ranks, backend, folder, args, results):
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    # As tests/conftest.py has it, which is not loaded here.
    for owner, name, replacement in poisoned():
        setattr(owner, name, replacement)
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        if backend:
            dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks,
                                    timeout=datetime.timedelta(seconds=HANG))
        outcome = Outcome(function(rank, ranks, *args))
    except BaseException as error:
        outcome = Outcome(None, type(error).__name__, str(error), traceback.format_exc())
    results.put((rank, outcome))
    # Until everybody has answered: a rank that goes takes its connections with it.
    results.close()
    results.join_thread()
    if dist.is_initialized():
        dist.destroy_process_group()


def on_ranks(function, ranks, *args, backend="gloo"):
    """``function(rank, ranks, *args)`` on ``ranks`` processes -> the ``Outcome`` of each, by rank; "TimeoutError" of those that hang.

    Args:
        function: found by name in a new process; it returns what can be pickled.
        backend: "gloo"; "nccl", where rank r has the r-th GPU; or None, where the function itself makes the group.
    """
    context = mp.get_context("spawn" if backend == "nccl" else "forkserver")
    if backend != "nccl":
        context.set_forkserver_preload(IMPORTED)
    results, found = context.Queue(), {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "store").touch()
        processes = [context.Process(target=_rank, daemon=True, args=(
            function, rank, ranks, backend, folder, args, results)) for rank in range(ranks)]
        try:
            # The process to fork from finds modules by it alone.
            with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
                for process in processes:
                    process.start()
            end = time.monotonic() + HANG
            while len(found) < ranks and time.monotonic() < end:
                try:
                    rank, outcome = results.get(timeout=0.2)
                except queue.Empty:
                    if all(not process.is_alive() for process in processes):
                        end = min(end, time.monotonic() + 1)
                    continue
                found[rank] = outcome
                if outcome.error:
                    end = min(end, time.monotonic() + GRACE)
            for process in processes:
                process.join(timeout=2)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
    late = Outcome(None, "TimeoutError", f"no answer within {HANG} s, or of the {GRACE} s after another rank's error")
    return [found.get(rank, late) for rank in range(ranks)]


def values_of(outcomes):
    """What each rank returned.

    Raises:
        AssertionError: a rank raised or did not answer, with all their tracebacks.
    """
    failed = [f"rank {rank}: {outcome.error}: {outcome.message}\n{outcome.trace}" for rank, outcome in enumerate(outcomes) if outcome.error]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes]
