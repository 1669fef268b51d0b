"""From lists of blocks to a GPU's work: chunks, schedules, descriptors, launches; no attention of its own."""
