"""Attention that is decided token by token, and to key blocks too short for a tile, in Triton."""
