"""The Hopper kernels compile for sm_90a on a machine without a GPU, with no spill and no serialised matrix product."""

import os
import subprocess
import sys
from pathlib import Path


def test_every_configuration_compiles_well(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # A cache of its own: what is printed must come from this compiler and this code.
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compile_hopper.py")
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("fine") == 38
