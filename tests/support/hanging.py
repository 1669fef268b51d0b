"""The one limit on time that tests have: it ends what waits for good, and no machine that works, however slow or loaded, reaches it."""

HANG = 1200  # seconds
