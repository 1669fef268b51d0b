"""What SSTA reads of diffusers' attention dispatcher that is private there, and so only in the diffusers that it was checked with."""

from __future__ import annotations

import diffusers

# The release line that the tests run under; pyproject.toml asks for the same.
_CHECKED = "0.42."


def default_is_sdpa() -> bool:
    """Whether diffusers attends with torch's SDPA where a model chose no backend: unless somebody says otherwise for the process.

    False under a diffusers that was not checked: attention then goes the way that diffusers says.
    """
    if not diffusers.__version__.startswith(_CHECKED):
        return False
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    return _AttentionBackendRegistry.get_active_backend()[0] == AttentionBackendName.NATIVE
