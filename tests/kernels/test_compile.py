"""What the package launches compiles for GPUs of several kinds without one, fits them, and has its loops in registers."""

import os
import subprocess
import sys

import compile_kernels
import pytest
from pretend import CARDS, Compiled, Loop, has_local_memory, loops


@pytest.mark.slow
def test_kernels_of_a_card_compile_well():
    """Few, in a process of its own, in which Triton's interpreter is off and no GPU is seen; all are what `make compile` is for."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, compile_kernels.__file__, "--jobs", "1", "sm_89", "gathered|fp16"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = run.stdout.splitlines()
    assert run.returncode == 0 and len(lines) > 2, "\n".join(line for line in lines if not line.endswith(": fine")) + run.stderr


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
    assert loops(ASSEMBLY) == [Loop(instructions=3, products=1, reloads=1, spills=0)]


RINGS = """
    %31 = ttg.local_alloc : () -> !ttg.memdesc<1x1xi64, #shared2, #smem, mutable>
    %3 = ttg.local_alloc : () -> !ttg.memdesc<4x1xi64, #shared2, #smem, mutable>
    %45 = ttg.memdesc_index %31[%c0_i32] : !ttg.memdesc<1x1xi64, #shared2, #smem, mutable>
    ttng.init_barrier %45, 1 : !ttg.memdesc<1xi64, #shared2, #smem, mutable>
"""


@pytest.mark.parametrize("partitions, idle", [
    ("ttg.warp_specialize(%3, %31)", False), ("ttg.warp_specialize(%31)\n ttng.wait_barrier %3, %4", False),
    ("ttg.warp_specialize(%31)", True), ("ttg.return", False)])
def test_barriers_that_nobody_uses(partitions, idle):
    assert Compiled("kernel", "", CARDS[90], 0, 0, RINGS + partitions, "", None).idle_barriers == idle


def test_only_kernels_with_local_memory_are_looked_through():
    said = "    {} bytes stack frame, {} bytes spill stores, 0 bytes spill loads\nptxas info    : Used 255 registers"
    assert not has_local_memory(said.format(0, 0)) and has_local_memory(said.format(0, 8)) and has_local_memory(said.format(16, 0))
    assert has_local_memory("ptxas info    : Used 255 registers"), "words that are not known"
