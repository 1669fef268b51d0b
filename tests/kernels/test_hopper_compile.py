"""The Hopper kernels compile for sm_90a without a GPU: no register is reloaded in their loops, no matrix product serialised."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from compile_hopper import reloads

pytestmark = pytest.mark.slow


def test_every_configuration_compiles_well(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # A cache of its own: what is printed must come from this compiler and this code.
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).parents[1] / "tools" / "compile_hopper.py"
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("fine") == 44


ASSEMBLY = """
        /*0000*/                   LDL R1, [R2] ;
.L_x_1:
        /*0010*/              @!P0 BRA `(.L_x_3) ;
.L_x_2:
        /*0020*/                   LDL.64 R4, [R2] ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8] ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
.L_x_3:
        /*0050*/                   LDL R7, [R2] ;
        /*0060*/               @P0 BRA `(.L_x_2) ;
        /*0070*/                   LDL R7, [R2] ;
        /*0080*/              @!P2 BRA `(.L_x_3) ;
"""


def test_what_counts_as_reloaded():
    """One word: neither what is outside of the loop around the product, nor where its waiting was moved to, nor other loops."""
    assert reloads(ASSEMBLY) == 1
