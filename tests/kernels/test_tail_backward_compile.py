"""The kernels of the tail's backward compile for GPUs of several kinds without one."""

import os
import subprocess
import sys

import compile_tail_backward
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("capability", compile_tail_backward.SHARED_MEMORY)
def test_every_configuration_compiles_well(capability, tmp_path):
    """In a process of its own, in which Triton's interpreter is off."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, compile_tail_backward.__file__, f"sm_{capability}"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = run.stdout.splitlines()
    assert run.returncode == 0 and len(lines) > 20, "\n".join(line for line in lines if not line.endswith(": fine")) + run.stderr
