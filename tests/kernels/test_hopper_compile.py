"""The Hopper kernels compile for sm_90a without a GPU: no register is reloaded in their loops, no matrix product serialised."""

import os
import subprocess
import sys

import compile_hopper
import pytest
from compile_hopper import configurations, reloads

pytestmark = pytest.mark.slow


class Compiler:
    """compile_hopper.py in a process of its own, in which Triton's interpreter is off; the tests of a worker share its imports."""

    def __init__(self, cache):
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        # A cache of its own: what is printed must come from this compiler and this code.
        environment["TRITON_CACHE_DIR"] = str(cache)
        self.start = lambda: subprocess.Popen([sys.executable, compile_hopper.__file__, "-"], env=environment, text=True,
                                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.process = self.start()

    def says(self, label):
        """The line that it prints of a configuration; where it dies of one, why."""
        self.process.stdin.write(f"{label}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            line = self.process.communicate()[1]
            self.process = self.start()
        return line.strip()


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    made = Compiler(tmp_path_factory.mktemp("triton"))
    yield made
    made.process.communicate()


@pytest.mark.parametrize("label", configurations())
def test_a_configuration_compiles_well(label, compiler):
    said = compiler.says(label)
    assert said.startswith(f"{label}: ") and said.endswith(": fine"), said


def test_a_configuration_that_does_not_compile_says_why(compiler):
    assert "KeyError: 'forward D=7'" in compiler.says("forward D=7")


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
