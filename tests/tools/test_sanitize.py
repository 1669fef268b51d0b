"""sanitize.py tells hazards on data from those on words without data."""

from types import SimpleNamespace

import pytest
import sanitize

PTX = """
	mov.b32 	%r9, global_smem;
	add.s32 	%r1, %r9, 1024;
	@%p1 mbarrier.init.shared::cta.b64 [%r1], 2;
	st.shared.v2.b32 	[global_smem+512], {%r5, %r6};
	add.s32 	%r2, %r9, %r7;
	st.shared.v4.b32 	[%r2], {%r1, %r1, %r1, %r1};
	st.shared.v4.b32 	[%r2+64], {%r1, %r1, %r1, %r1};
"""


def test_words_of_barriers_and_fixed_stores():
    assert sanitize.words_without_data(PTX) == {1024, 1028, 512, 516}


def test_only_hazards_on_such_words_are_left_out():
    def hazard(kind, address, kernel):
        return (f"========= Error: Potential {kind} hazard detected at __shared__ {address:#x} in block (8,0,0) :\n"
                f"=========     Write Thread (0,0,0) at {kernel}+0x1a0 in some.py:32\n"
                "=========     Current Value : 2, Incoming Value : 3\n")

    text = (hazard("WAW", 1024 + 1028, "_kernel") + hazard("RAW", 1024 + 1032, "_kernel") + hazard("WAW", 1024 + 512, "_other")
            + hazard("WAR", 512, "nvjet_sm90_tss_8x64")
            + "========= Invalid __global__ write of size 4 bytes\n=========     at _kernel+0x100 in some.py:3\n")
    errors, left_out = sanitize.judge(text, {"_kernel": sanitize.words_without_data(PTX), "_other": set()})
    assert left_out == 2
    assert [error.split()[:2] for error in errors] == [["Potential", "RAW"], ["Potential", "WAW"], ["Invalid", "__global__"]]
    assert sanitize.judge("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", {}) == ([], 0)


def test_what_a_barrier_hands_over_is_left_out():
    """The next reader's words, and the next writer's after a reader; not what others store, nor what a tool says of that line else."""
    where = sanitize.handed_over()
    assert len(where) == len(sanitize.HANDED_OVER)

    def hazard(kind, first, second):
        return (f"========= Error: Potential {kind} hazard detected at __shared__ 0x33700 in block (9,0,0) :\n"
                f"=========     {first} Thread (415,0,0) at _kernel+0xb910 in {{0}}\n=========     {second}\n"
                "=========     Current Value : 64, Incoming Value : 33\n========= \n")

    reading = "Read Thread (160,0,0) at _kernel+0xcc30 in primitives.py:7"
    text = hazard("RAW", "Write", reading)
    text += hazard("WAR", "Read", "Write Thread (415,0,0) at _kernel+0x9 in {0}").replace("{0}", "a.py:1", 1)
    text += "========= Invalid __shared__ write of size 4 bytes\n=========     at _kernel+0xb910 in {0}\n"
    for at in where:
        errors, left_out = sanitize.judge(text.replace("{0}", at), {})
        assert left_out == 2 and errors == [f"Invalid __shared__ write of size 4 bytes; at _kernel+0xb910 in {at}"]
    errors, left_out = sanitize.judge(text.replace("{0}", "backward_partitions.py:1"), {})
    assert left_out == 0 and len(errors) == 3
    assert errors[0].endswith(f"Write Thread (415,0,0) at _kernel+0xb910 in backward_partitions.py:1; {reading}")


def test_what_partitions_wait_for_is_left_out():
    """Bytes that a partition reads at the ``def`` of its kernel, wherever the first one wrote them; not what a statement reads."""
    waiting = sorted(sanitize.of_triton())
    for at in waiting:
        name, line = at.split(":")
        assert (sanitize.KERNELS / "hopper" / name).read_text().splitlines()[int(line) - 1].startswith("def _")
    text = ("========= Error: Potential RAW hazard detected at __shared__ 0x20512 in block (0,0,0) :\n"
            "=========     Write Thread (127,0,0) at _merge_kernel+0x35d0 in estimate_merge.py:341\n"
            "=========     Read Thread (192,0,0) at _merge_kernel+0x120 in {0}\n=========     Current Value : 1, Incoming Value : 2\n")
    assert all(sanitize.judge(text.replace("{0}", at), {}) == ([], 1) for at in waiting)
    assert len(sanitize.judge(text.replace("{0}", "estimate_merge.py:341"), {})[0]) == 1


@pytest.mark.parametrize("tool, said", [
    ("memcheck", "========= Invalid __global__ write of size 4 bytes\n=========     at _store_kernel+0x80 in sanitize.py:1\n"
                 "=========     by thread (3,0,0) in block (0,0,0)\n========= ERROR SUMMARY: 1 error"),
    ("racecheck", "========= Warning: Potential WAW hazard detected at __shared__ 0x400 in block (0,0,0) :\n"
                  "=========     Write Thread (0,0,0) at _two_stores_kernel+0x1a0 in sanitize.py:1\n"
                  "=========     Write Thread (128,0,0) at _two_stores_kernel+0x2b0 in sanitize.py:1\n"
                  "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)"),
])
def test_a_planted_error_is_found_only_by_what_it_is(tool, said, monkeypatch, tmp_path, capsys):
    """A launch that fails, as after an illegal address, is not what was planted; nor is an error in a family of kernels fine."""

    def says(text):
        monkeypatch.setattr(sanitize.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=text, stderr="", returncode=0))

    planted, clean = sanitize.PLANTED[tool][0], said.rsplit("=========", 1)[1]
    for text, planted_is_fine, family_is_fine in (
            (said, True, False), (f"========={clean}", False, True), ("no such option", False, False),
            (f"========= Program hit cudaErrorIllegalAddress\n=========     at x\n========={clean}", False, False)):
        says(text)
        assert sanitize.report(tool, planted, tmp_path) is planted_is_fine, capsys.readouterr().out
        assert sanitize.report(tool, "triton", tmp_path) is family_is_fine, capsys.readouterr().out


def test_words_of_a_kernel_compiled_twice_are_those_without_data_in_both(monkeypatch, tmp_path, capsys):
    for form, address in (("a", 512), ("b", 520)):
        (tmp_path / form).mkdir()
        (tmp_path / form / "_kernel.ptx").write_text(f"\tst.shared.v4.b32 \t[global_smem+{address}], {{%r1, %r2, %r3, %r4}};\n")
    hazards = "".join(f"========= Error: Potential WAW hazard detected at __shared__ {sanitize.RESERVED + at:#x} in block (0,0,0) :\n"
                      "=========     Write Thread (0,0,0) at _kernel+0x1 in a.py:1\n" for at in (516, 524, 532))
    said = SimpleNamespace(stdout=hazards + "========= RACECHECK SUMMARY: 3 hazards displayed", stderr="", returncode=0)
    monkeypatch.setattr(sanitize.subprocess, "run", lambda *_, **__: said)
    assert not sanitize.report("racecheck", "triton", tmp_path)
    printed = capsys.readouterr().out
    assert "2 errors" in printed and "(1 reports of words without data)" in printed
