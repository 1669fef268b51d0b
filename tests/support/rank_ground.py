"""What the process does once that ranks of tests are forked from, as tests/conftest.py does it, which is not loaded there."""

import gc
import os

from quick_interpreter import quicken
from uninitialised import poisoned

if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()
# What it looks up takes as long as some cases.
poisoned()
gc.collect()
gc.freeze()
gc.set_threshold(100_000)
