"""sanitize.py tells hazards on data from those on words without data."""

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
            + "========= Invalid __global__ write of size 4 bytes\n=========     at _kernel+0x100 in some.py:3\n")
    errors, left_out = sanitize.judge(text, {"_kernel": sanitize.words_without_data(PTX), "_other": set()})
    assert left_out == 1
    assert [error.split()[:2] for error in errors] == [["Potential", "RAW"], ["Potential", "WAW"], ["Invalid", "__global__"]]
    assert sanitize.judge("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", {}) == ([], 0)


def test_what_a_barrier_hands_over_is_left_out():
    where = sanitize.handed_over()
    assert len(where) == len(sanitize.HANDED_OVER)
    text = "".join(f"========= Error: Potential RAW hazard detected at __shared__ 0x33700 in block (9,0,0) :\n"
                   f"=========     Write Thread (415,0,0) at _kernel+0xb910 in {at}\n" for at in (*where, "hopper_backward_steps.py:1"))
    errors, left_out = sanitize.judge(text, {})
    assert left_out == 1 and len(errors) == 1 and errors[0].endswith("hopper_backward_steps.py:1")
