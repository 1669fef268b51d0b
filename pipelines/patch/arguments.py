"""ArgumentNames: a forward's arguments by name, also where a model's own forward only hands them on to another one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from inspect import Parameter, Signature
from typing import Any

from torch import nn

_POSITIONAL = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD
_PASSED_ON = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD


class ArgumentNames:
    """Names the arguments of a model's forwards, and requires the ones that its family's canvas reads.

    A forward with ``*args`` or ``**kwargs`` hands these on to the next one. The first is the instance's, the next is its class's, and each
    base class comes after it. Names that no forward has pass, because a wrapper may take more than the model does.

    Args:
        model: the transformer.
        family: the name of its family.
        canvas: the family's function.

    Raises:
        ValueError: no forward takes an argument that the canvas reads.
    """

    def __init__(self, model: nn.Module, family: str, canvas: Callable[[Any, Mapping[str, Any]], Any]) -> None:
        # Taken here, because torch.compile cannot look through the decorators of a forward.
        self._family = family
        positions: list[str] = []
        names: set[str] = set()
        by_position = by_name = True
        for signature in _forwards(model):
            parameters = signature.parameters.values()
            kinds = {parameter.kind for parameter in parameters}
            if by_position:
                positions += [of.name for of in parameters if of.kind in _POSITIONAL and of.name not in positions]
            if by_name:
                names.update([of.name for of in parameters if of.kind not in _PASSED_ON])
            by_position, by_name = by_position and Parameter.VAR_POSITIONAL in kinds, by_name and Parameter.VAR_KEYWORD in kinds
        self._positions = tuple(positions)
        asked = _Asked()
        # There is nothing to look at, so the function fails at some point.
        with suppress(Exception):
            canvas(model, asked)
        self._required = tuple(asked.required)
        takes = names.union(positions)
        missing = [name for name in self._required if name not in takes]
        if not self._required and not takes.intersection(asked.optional):
            missing = asked.optional
        if missing and not by_name:
            raise ValueError(f"{type(model).__name__}.forward must take {' or '.join(missing)}, from which SSTA takes the canvas of "
                             f"{family}, got a forward that takes {', '.join(sorted(takes)) or 'nothing'}; a forward that hands its "
                             "arguments on as *args and **kwargs will do")

    def by_name(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call.

        Raises:
            TypeError: an argument that the canvas reads is missing.
        """
        arguments = {**dict(zip(self._positions, args)), **kwargs}
        for name in self._required:
            if name not in arguments:
                raise TypeError(f"{self._family} must be called with {name}, from which SSTA takes the canvas, by keyword where its "
                                f"forward does not name it, got {', '.join(arguments) or 'no argument that has a name'}")
        return arguments


class _Asked(dict):
    """No arguments, and the names that a function asks for: required names, and optional ones."""

    def __init__(self) -> None:
        super().__init__()
        self.required: list[str] = []
        self.optional: list[str] = []

    def __missing__(self, name: str) -> Any:
        self.required.append(name)
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.optional.append(name)
        return default


def _forwards(model: nn.Module) -> Iterator[Signature]:
    """The signatures of the forwards that a call may come through, outermost first, without ``self``."""
    own = vars(model).get("forward")
    if own is not None:
        yield inspect.signature(own)
    for base in type(model).__mro__:
        if base is nn.Module:
            return
        if "forward" in vars(base):
            signature = inspect.signature(vars(base)["forward"])
            parameters = list(signature.parameters.values())
            yield signature.replace(parameters=parameters[1:] if parameters and parameters[0].kind in _POSITIONAL else parameters)
