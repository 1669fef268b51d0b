"""Attention in Gluon for Hopper GPUs (sm_90)."""
