"""Compiles the kernels of the tail's backward for GPUs of several kinds, without one, and prints a line of what ptxas says of each.

    python tests/tools/compile_tail_backward.py

Many bytes spilled, a serialised wgmma (C751x) or more shared memory than the kind of GPU has makes it exit with 1. TRITON_INTERPRET must
not be set, because the interpreter takes the compiler's place.
"""

import re
import sys
from itertools import product

from compile_tail import DTYPES, SHARED_MEMORY, _compile

from ssta.kernels.device import DeviceLimits
from ssta.kernels.lowering.arguments import View
from ssta.kernels.portable import tail_backward
from ssta.kernels.portable.tail_backward import tail_launches

# Bytes a thread, outside of the loops: results that wait to be stored. Float32 is there to be right.
SPILLS = {"bf16": 160, "fp16": 160, "fp32": 1024}


def kernels(name: str, linear: bool) -> dict[str, tuple]:
    """Label -> (kernel, types of its arguments but for int32, constants)."""
    floats, offsets, view = "*fp32", "*i32", View(f"*{name}", "i32", "i32", "i32")
    squares = "*bf16" if linear else None
    rows = dict.fromkeys(("q", "dout"), view) | dict(offsets=offsets, lse=floats, tail_lse=floats)
    means = dict(k_mean=view, v_mean=view) | dict.fromkeys(("lse2", "shift", "bias2"), floats)
    of_rows = dict.fromkeys(("exact", "out", "dexact", "dq"), view) | dict.fromkeys(("exact_lse", "dlse", "dexact_lse"), floats)
    of_means = dict(dk_mean=floats, dv_mean=floats)
    tokens = dict.fromkeys(("k", "v", "dk", "dv"), view) | of_means | means
    found = {
        "rows": (tail_backward._tail_rows_kernel, rows | means | of_rows | dict(matrix=squares), dict(PARTS=6)),
        "units": (tail_backward._tail_units_kernel, rows | means | of_means, {}),
        "matrix": (tail_backward._tail_matrix_kernel, rows | dict(dmatrix=squares), {}),
        "tokens": (tail_backward._tail_tokens_kernel, tokens | dict(dcovariance=squares, log_count=floats, order=offsets, offsets=offsets),
                   dict(PARTS=2)),
    }
    return found if linear else {key: found[key] for key in ("rows", "tokens")}


def main() -> int:
    fine = True
    for capability, (name, dim), linear in product(
            SHARED_MEMORY, (("bf16", 128), ("fp16", 64), ("bf16", 80), ("bf16", 256), ("fp32", 128)), (True, False)):
        launches = tail_launches(dim, DTYPES[name], DeviceLimits(SHARED_MEMORY[capability], capability >= 90))
        for key, (kernel, types, constants) in kernels(name, linear).items():
            label = f"{key} sm_{capability} D={dim} {name}{'' if linear else ' means'}"
            if not all(word in label for word in sys.argv[1:]):
                continue
            options = dict(launches[key])
            sizes = {size: options.pop(size) for size in list(options) if size in kernel.arg_names}
            shared, said = _compile(kernel, types, constants | sizes, options, capability)
            spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
            wrong = [problem for problem, there in (("spills", spilled > SPILLS[name]), ("serialised wgmma", "C751" in said),
                                                    ("too much shared memory", shared > SHARED_MEMORY[capability])) if there]
            registers = re.search(r"Used (\d+) registers", said).group(1)
            print(f"{label}: {registers} registers, {spilled} bytes spilled, {shared} bytes shared: {', '.join(wrong) or 'fine'}",
                  flush=True)
            fine = fine and not wrong
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
