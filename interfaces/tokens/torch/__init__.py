"""Attention that is decided token by token, in plain torch: runs wherever torch runs."""
