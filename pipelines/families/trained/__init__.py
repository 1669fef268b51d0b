"""Checkpoints that others trained with a sparse attention of their own: where their branches come from, and what runs them."""
