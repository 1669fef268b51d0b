"""on_ranks: a function on several gloo processes of this machine, under a time limit, with what each of them returned or raised."""

import datetime
import os
import queue
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from uninitialised import poisoned

# A rank that raised leaves the others in a collective: so long they are waited for.
GRACE = 5


@dataclass(frozen=True)
class Outcome:
    """What a rank returned, or what it raised: the exception's type by name, its text and its traceback."""

    value: object = None
    error: str | None = None
    message: str = ""
    trace: str = ""


def _rank(function, rank, ranks, folder, seconds, args, results):
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    # As tests/conftest.py has it, which is not loaded here.
    for owner, name, replacement in poisoned():
        setattr(owner, name, replacement)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks,
                                timeout=datetime.timedelta(seconds=seconds))
        outcome = Outcome(function(rank, ranks, *args))
    except BaseException as error:
        outcome = Outcome(None, type(error).__name__, str(error), traceback.format_exc())
    results.put((rank, outcome))
    # Until everybody has answered: a rank that goes takes its connections with it.
    results.close()
    results.join_thread()
    if dist.is_initialized():
        dist.destroy_process_group()


def on_ranks(function, ranks, *args, seconds=60, collective_seconds=20):
    """``function(rank, ranks, *args)`` on ``ranks`` gloo processes -> the ``Outcome`` of each, by rank.

    Args:
        function: found by name in a new process; it returns what can be pickled.
        seconds: what has not answered then is ended, and its outcome is the error "TimeoutError".
        collective_seconds: the process group's own limit, after which a collective whose other ranks do not come raises.
    """
    context = mp.get_context("spawn")
    results, found = context.Queue(), {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "store").touch()
        processes = [context.Process(target=_rank, args=(function, rank, ranks, folder, collective_seconds, args, results), daemon=True)
                     for rank in range(ranks)]
        try:
            for process in processes:
                process.start()
            end = time.monotonic() + seconds
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
    late = Outcome(None, "TimeoutError", f"no answer within {seconds} s, or of the {GRACE} s after another rank's error")
    return [found.get(rank, late) for rank in range(ranks)]


def values_of(outcomes):
    """What each rank returned.

    Raises:
        AssertionError: a rank raised or did not answer, with all their tracebacks.
    """
    failed = [f"rank {rank}: {outcome.error}: {outcome.message}\n{outcome.trace}" for rank, outcome in enumerate(outcomes) if outcome.error]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes]
