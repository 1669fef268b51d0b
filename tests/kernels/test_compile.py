"""What the package launches compiles for GPUs of several kinds without one, fits them, and has its loops in registers."""

import os
import subprocess
import sys

import compile_kernels
import pytest
from pretend import CARDS, Loop, has_local_memory, loops

# Few, because each process imports torch and Triton, and about as long, for the workers that share them.
SHARES = ["sm_80|sm_89|sm_120", "sm_100|amd", "sm_90 portable|tail", "sm_90 hopper forward|backward"]


def test_every_case_has_its_share():
    labels = [f"{CARDS[card]} {name}" for name, case in compile_kernels.cases().items() for card in case.cards]
    assert len(set(labels)) == len(labels)
    for label in labels:
        assert sum(compile_kernels.chosen(label, share.split()) for share in SHARES) == 1, label


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
def test_every_kernel_compiles_well(share, tmp_path):
    """In a process of its own, in which Triton's interpreter is off and no GPU is seen."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, compile_kernels.__file__, *share.split()], env=environment, capture_output=True, text=True)
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


def test_only_kernels_with_local_memory_are_looked_through():
    said = "    {} bytes stack frame, {} bytes spill stores, 0 bytes spill loads\nptxas info    : Used 255 registers"
    assert not has_local_memory(said.format(0, 0)) and has_local_memory(said.format(0, 8)) and has_local_memory(said.format(16, 0))
    assert has_local_memory("ptxas info    : Used 255 registers"), "words that are not known"
