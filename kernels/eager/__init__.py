"""Attention in plain torch: runs wherever torch runs."""
