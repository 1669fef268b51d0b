"""Attention in Triton: runs on every GPU that Triton knows."""
