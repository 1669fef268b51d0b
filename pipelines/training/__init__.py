"""Training through SSTA: a dense teacher beside the sparse student, a density that falls, and gradient checkpointing."""
