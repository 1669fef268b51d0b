"""Our functions in sys.modules under another package's own name, for programs that import that package and are not to be changed."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import ExitStack
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

from ..kernels.checks import require_bool

# Package -> its modules -> what is in them of ours: what programs import. Of flex-block-attn that is the one function that its released
# package exports; the masks of its first commits had other arguments and another window than ours.
_BLOCK_SPARSE_ATTN = ("block_sparse_attn_func", "block_streaming_attn_func", "token_streaming_attn_func")
_MODULES: dict[str, dict[str, tuple[str, ...]]] = {
    "flex_block_attn": {
        "flex_block_attn": ("flex_block_attn_func",),
        "flex_block_attn.flex_block_attn_interface": ("flex_block_attn_func",),
    },
    "block_sparse_attn": {
        "block_sparse_attn": _BLOCK_SPARSE_ATTN,
        "block_sparse_attn.block_sparse_attn_interface": _BLOCK_SPARSE_ATTN,
        "block_sparse_attn.bert_padding": ("pad_input", "unpad_input"),
    },
}
# For each package that is in place, what takes it back.
_installed: dict[str, ExitStack] = {}


def install(name: str, *, replace: bool = False) -> ExitStack:
    """Enters our functions in ``sys.modules`` as the package ``name``: in this process ``from name import ...`` gives them.

    Call it before the program that imports the package is itself imported: what a program has already imported, or has found missing, it
    keeps. Nothing else changes: no file is written, and other processes know nothing of it.

    Args:
        name: "flex_block_attn", with ``flex_block_attn_func`` and the module ``flex_block_attn_interface``; or "block_sparse_attn", with
            ``block_sparse_attn_func``, ``block_streaming_attn_func`` and ``token_streaming_attn_func``, the module
            ``block_sparse_attn_interface`` and the module ``bert_padding`` with ``pad_input`` and ``unpad_input``.
        replace: stand in for a package of that name that is installed or imported, until ``uninstall``. Without it, such a package is
            never hidden.

    Returns:
        A context manager: ``with install(name): ...`` uninstalls at the end of the block, unless ``uninstall`` did before.

    Raises:
        TypeError: ``replace`` is no bool.
        ValueError: no such name; installed already; the package itself is there and ``replace`` is False.
    """
    _require_known(name)
    require_bool("replace", replace)
    if name in _installed:
        raise ValueError(f"name must not be installed yet, got {name!r}, which is; uninstall({name!r}) takes it back")
    found = _find(name)
    if found is not None and not replace:
        raise ValueError(f"name must not hide a package unless replace=True, got {name!r}, which is {found}")
    entered = _make(name)
    hidden = {key: module for key, module in list(sys.modules.items()) if key == name or key.startswith(name + ".")}
    for key in hidden:
        del sys.modules[key]
    sys.modules.update(entered)
    _installed[name] = ExitStack()
    _installed[name].callback(_take_back, name, entered, hidden)
    return _installed[name]


def uninstall(name: str) -> None:
    """Takes back what ``install`` did: ``sys.modules`` is as it was, modules that were hidden included.

    Programs that imported the functions in between keep them.

    Raises:
        ValueError: no such name; not installed.
    """
    _require_known(name)
    if name not in _installed:
        raise ValueError(f"name must be installed before it is uninstalled, got {name!r}, which is not")
    _installed[name].close()


def _take_back(name: str, entered: dict[str, ModuleType], hidden: dict[str, ModuleType]) -> None:
    del _installed[name]
    # A module that others have put in its place since stays.
    for key, module in entered.items():
        if sys.modules.get(key) is module:
            del sys.modules[key]
    for key, module in hidden.items():
        sys.modules.setdefault(key, module)


def _require_known(name: str) -> None:
    if not isinstance(name, str) or name not in _MODULES:
        raise ValueError(f"name must be one of {sorted(_MODULES)}, got {name!r}")


def _find(name: str) -> str | None:
    """Where a package of that name is, in words, or None."""
    if name in sys.modules:
        return f"imported from {getattr(sys.modules[name], '__file__', None) or 'an unknown place'}"
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    return f"installed in {spec.origin or ', '.join(spec.submodule_search_locations or ())}"


def _make(name: str) -> dict[str, ModuleType]:
    """The package's modules by their full names."""
    ours = import_module(__package__)
    made = {}
    for full, names in _MODULES[name].items():
        module = made[full] = ModuleType(full, f"{ours.__name__} under the name that programs import; {__name__}.uninstall takes it back.")
        # With a specification the module is found by those who look before they import; without a path nothing else is found in it.
        module.__spec__ = ModuleSpec(full, None, origin=ours.__name__, is_package=full == name)
        module.__package__ = name
        if full == name:
            module.__path__ = []
        else:
            setattr(made[name], full.removeprefix(name + "."), module)
        for function in names:
            setattr(module, function, getattr(ours, function))
    return made
