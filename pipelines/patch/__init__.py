"""SSTA put into a diffusers model and taken out again: the processors, what they share, and what they report."""
