"""Dense self-attention of a model, seen or replaced where it is called."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode


class Replaced(TorchFunctionMode):
    """Within it every call of dense attention from ``tokens`` tokens to themselves is one of ``attend(q, k, v)``, ``[B, H, S, D]`` all."""

    def __init__(self, tokens: int, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.tokens, self.attend = tokens, attend

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args)) | (kwargs or {})
            q, k, v = (named[name] for name in ("query", "key", "value"))
            if q.shape[2] == k.shape[2] == self.tokens:
                return self.attend(q, k, v)
        return func(*args, **(kwargs or {}))


class Seen(Replaced):
    """Within it ``seen`` takes over q, k and v of every such call, which stays dense."""

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens, self._see)
        self.seen: list[tuple[Tensor, ...]] = []

    def _see(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.seen.append((q, k, v))
        return scaled_dot_product_attention(q, k, v)
