"""Attention that checkpoints were trained with by others: exact attention to some tiles, and a branch beside it for all of them."""
