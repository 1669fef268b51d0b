"""SSTA in other programs, one module each. Nothing here needs diffusers."""
