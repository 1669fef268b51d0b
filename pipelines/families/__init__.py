"""The models that SSTA knows, one file a family."""
