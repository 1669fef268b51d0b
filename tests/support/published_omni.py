"""vLLM-Omni's published files on a CPU: loaded as they are, with stand-ins for vLLM, which needs a GPU, and for the platform."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import logging
import pkgutil
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

REQUIREMENT = "vllm-omni==0.30.0"
# Their own __init__ files start the whole engine.
_HOLLOW = ("vllm_omni", "vllm_omni.diffusion", "vllm_omni.diffusion.attention", "vllm_omni.platforms")


class _Anything(type):
    """A class of whatever name is asked for; called with a function alone it is a decorator that changes nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not options else super().__call__()


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module of vLLM."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "vllm" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextlib.contextmanager
def published_omni(folder: Path) -> Iterator[SimpleNamespace]:
    """What tests need of the vLLM-Omni in ``folder``; afterwards neither it nor its stand-ins are left in sys.modules."""
    before = set(sys.modules)
    finder = _StandIns()
    sys.meta_path.insert(0, finder)
    try:
        yield _load(folder)
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("vllm", "vllm_omni") or name == "ssta.pipelines.plugs.vllm_omni_backend":
                del sys.modules[name]
        vars(sys.modules["ssta.pipelines.plugs"]).pop("vllm_omni_backend", None)


def _load(folder: Path) -> SimpleNamespace:
    load = importlib.import_module
    for name in _HOLLOW:
        package = ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        package.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules[name] = package
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, package)
    load("vllm.logger").init_logger = logging.getLogger
    load("vllm.utils.import_utils").resolve_obj_by_qualname = lambda path: pkgutil.resolve_name(":".join(path.rsplit(".", 1)))
    load("vllm.model_executor.layers.quantization").QUANTIZATION_METHODS = []
    load("vllm.model_executor.models.utils").extract_layer_index = lambda prefix: int(prefix.split(".")[1])
    load("vllm.envs").VLLM_PLUGINS = None
    load("vllm.plugins").load_general_plugins = lambda: None
    base = load("vllm_omni.platforms.interface")
    registry = load("vllm_omni.diffusion.attention.backends.registry").DiffusionAttentionBackendEnum

    class Platform(base.OmniPlatform):
        """An NVIDIA GPU whose default is SDPA; what is selected is checked by vLLM-Omni itself."""

        _omni_enum = base.OmniPlatformEnum.CUDA
        device_name = "cuda"

        @classmethod
        def get_device_count(cls) -> int:
            return 0

        @classmethod
        def get_diffusion_attn_backend_cls(cls, selected_backend, head_size, allow_trtllm_default=True) -> str:
            if selected_backend is None:
                return registry.TORCH_SDPA.get_path()
            cls.validate_diffusion_attn_backend(selected_backend)
            return registry[selected_backend.upper()].get_path()

    sys.modules["vllm_omni.platforms"].current_omni_platform = Platform()
    return SimpleNamespace(
        abstract=load("vllm_omni.diffusion.attention.backends.abstract"), config=load("vllm_omni.diffusion.config"),
        data=load("vllm_omni.diffusion.data"), context=load("vllm_omni.diffusion.forward_context"),
        layer=load("vllm_omni.diffusion.attention.layer"), plugins=load("vllm_omni.plugins"), registry=registry,
        selector=load("vllm_omni.diffusion.attention.selector"))
