"""Recipe: what makes a generation fast besides sparse attention, in the order in which it goes together; and what excludes what.

Everything is diffusers', torchao's or cache-dit's own; nothing here replaces a part of theirs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from diffusers.hooks._helpers import TransformerBlockRegistry
from generate import transformers
from torch import nn

from ssta.pipelines import apply_ssta

QUANTIZED = ("float8", "int8")
CACHES = ("first-block", "mag", "taylor", "cache-dit")
# Both decide from the tokens that they see whether a step is computed, and are told nothing of the other ranks.
DECIDE_BY_TOKENS = ("first-block", "cache-dit")
# Compiled blocks that a cache calls in several ways have more variants than the eight that torch keeps.
RECOMPILE_LIMIT = 64


@dataclass(frozen=True)
class Recipe:
    """What is switched on.

    Attributes:
        sparse: SSTA.
        compile: torch.compile for the transformer's repeated blocks.
        tune: Inductor tries how each of its kernels is best launched, which takes a while at the first step.
        quantize: "float8" or "int8", rows of activations and weights with scales of their own; None = as loaded.
        cache: which steps are skipped: "first-block", "mag" and "taylor" are diffusers' FirstBlockCache, MagCache and TaylorSeer, the last
            with whole blocks skipped and the output predicted; "cache-dit" is that package's. None = none are.
        cache_options: of the cache's own configuration, such as ``{"threshold": 0.1}``.
        lora: file or repository of a LoRA; it is fused into the weights.
        ranks: on how many GPUs each forward runs.
        backend: what compiles.
    """

    sparse: bool = True
    compile: bool = False
    tune: bool = False
    quantize: str | None = None
    cache: str | None = None
    cache_options: Mapping[str, Any] = field(default_factory=dict)
    lora: str | None = None
    ranks: int = 1
    backend: Any = "inductor"

    def check(self, kind: type, device: torch.device) -> None:
        """That all this goes together in a transformer of class ``kind`` on ``device``.

        Raises:
            ValueError: what does not, and why.
        """
        for excluded, reason in EXCLUDED:
            if excluded(self, kind, device):
                raise ValueError(reason.format(kind=kind.__name__, cache=self.cache, quantize=self.quantize))


def best_quantization(device: torch.device) -> str:
    """"float8" where the GPU multiplies it, from compute capability 8.9 on; else "int8"."""
    return "float8" if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9) else "int8"


def _missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def _unknown_blocks(recipe: Recipe, kind: type, device: torch.device) -> bool:
    """Whether diffusers' caches do not know what a block of this model returns."""
    if recipe.cache not in ("first-block", "mag"):
        return False
    module = importlib.import_module(kind.__module__)
    blocks = [value for name, value in vars(module).items() if name in (kind._no_split_modules or ()) and isinstance(value, type)]
    try:
        for block in blocks:
            if "Block" in block.__name__:
                TransformerBlockRegistry.get(block)
    except ValueError:
        return True
    return False


# (whether it excludes a recipe, the reason)
EXCLUDED: tuple[tuple[Callable[[Recipe, type, torch.device], bool], str], ...] = (
    (lambda r, kind, device: r.quantize not in (None, *QUANTIZED), "quantize must be 'float8', 'int8' or None, got '{quantize}'"),
    (lambda r, kind, device: r.cache not in (None, *CACHES),
     "cache must be 'first-block', 'mag', 'taylor', 'cache-dit' or None, got '{cache}'"),
    (lambda r, kind, device: bool(r.cache_options) and r.cache is None, "cache_options must come with a cache, got them alone"),
    (lambda r, kind, device: r.quantize is not None and _missing("torchao"),
     "quantize needs torchao, which is not installed: pip install torchao"),
    (lambda r, kind, device: r.quantize == "float8" and best_quantization(device) != "float8",
     "quantize must be 'int8' here, got 'float8', which needs a GPU of compute capability 8.9 or newer"),
    (lambda r, kind, device: r.cache == "cache-dit" and _missing("cache_dit"),
     "cache 'cache-dit' needs its package, which is not installed: pip install cache-dit"),
    (lambda r, kind, device: r.compile and not kind._repeated_blocks,
     "compile must be off for {kind}, for which diffusers names no repeated blocks"),
    (lambda r, kind, device: r.tune and not (r.compile and r.backend == "inductor"),
     "tune must come with compile, whose kernels Inductor then tunes, got it without"),
    (lambda r, kind, device: r.compile and r.cache == "mag",
     "compile must be off with cache 'mag', whose hooks switch the compiler off for the blocks inside them; 'first-block' goes with it"),
    (lambda r, kind, device: r.cache == "mag" and "mag_ratios" not in r.cache_options,
     "cache 'mag' needs cache_options with mag_ratios, which differ from model to model: one generation with "
     "diffusers.MagCacheConfig(calibrate=True) prints them"),
    (_unknown_blocks, "cache '{cache}' must be another one for {kind}, whose blocks diffusers' cache does not know; 'taylor' takes any"),
    (lambda r, kind, device: r.ranks > 1 and r.cache in DECIDE_BY_TOKENS,
     "cache '{cache}' must be off on several GPUs: each would decide by its own tokens whether to compute a step, and wait for others that "
     "skip it; 'mag' and 'taylor' decide by the step's number"))


@contextmanager
def cooked(pipe: Any, recipe: Recipe, steps: int, share_out: Callable[[Any], None] = lambda pipe: None, **sparse: Any) -> Iterator[Any]:
    """The pipeline with the recipe; gives SSTA's handle, None without SSTA. What the LoRA and the quantisation did to the weights, and the
    compiled blocks, stay.

    Args:
        pipe: on its device.
        recipe: checked.
        steps: of a generation.
        share_out: called with the pipeline where several GPUs share its forwards.
        sparse: arguments of ``apply_ssta``.
    """
    models = transformers(pipe)
    # Fused first: weights that are quantised take no LoRA any more.
    if recipe.lora is not None:
        fuse_lora(pipe, recipe.lora)
    if recipe.quantize is not None:
        for model in models:
            quantize(model, recipe.quantize)
    with ExitStack() as stack:
        handle = stack.enter_context(apply_ssta(pipe, **sparse)) if recipe.sparse else None
        # Before tokens are shared out, of which it then sees a rank's own, and before blocks are compiled, which then contain its hooks.
        if recipe.cache is not None:
            stack.enter_context(cached(pipe, recipe.cache, recipe.cache_options, steps))
        if recipe.ranks > 1:
            share_out(pipe)
        if recipe.compile:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
            for model in models:
                # A cache reads numbers from the device, where a graph ends.
                compile_blocks(model, recipe.backend, recipe.tune, fullgraph=recipe.cache is None)
        yield handle


def fuse_lora(pipe: Any, lora: str) -> None:
    """Loads a LoRA and adds it to the weights, so that it costs no time."""
    if hasattr(pipe, "load_lora_weights"):
        pipe.load_lora_weights(lora)
        pipe.fuse_lora()
        pipe.unload_lora_weights()
        return
    # HunyuanVideo 1.5's pipeline knows no LoRA, but its transformer does.
    pipe.transformer.load_lora_adapter(lora)
    pipe.transformer.fuse_lora()
    pipe.transformer.unload_lora()


def quantize(model: nn.Module, kind: str) -> None:
    """The linear layers of the model's blocks in 8 bits: weights now, activations as they come. Norms' own linear layers see one token, and
    stay."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, Int8DynamicActivationInt8WeightConfig, PerRow, quantize_

    # torchao would change Inductor's settings for the whole process: ``compile_blocks`` has them.
    configs = {"float8": lambda: Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False),
               "int8": lambda: Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)}
    stacks = tuple(f"{name}." for name, child in model.named_children() if isinstance(child, nn.ModuleList))

    def chosen(module: nn.Module, name: str) -> bool:
        # Products in 8 bits want multiples of 16.
        return (isinstance(module, nn.Linear) and name.startswith(stacks) and "norm" not in name
                and module.in_features % 16 == module.out_features % 16 == 0)

    quantize_(model, configs[kind](), filter_fn=chosen)


def compile_blocks(model: nn.Module, backend: Any = "inductor", tune: bool = False, fullgraph: bool = True) -> None:
    """Compiles the model's repeated blocks, with the settings that torchao advises to Inductor, but for tuning unless it is asked for, and
    then in one direction at a time: in all at once it takes minutes, for kernels that are a tenth of a block."""
    advised = {"force_fuse_int_mm_with_mul": True, "coordinate_descent_tuning": tune}
    options = advised if backend == "inductor" else None
    model.compile_repeated_blocks(fullgraph=fullgraph, backend=backend, options=options)


@contextmanager
def cached(pipe: Any, cache: str, options: Mapping[str, Any], steps: int) -> Iterator[None]:
    """The pipeline with a step cache, until the end of the ``with``."""
    if cache == "cache-dit":
        import cache_dit

        cache_dit.enable_cache(pipe, cache_config=cache_dit.DBCacheConfig(**options))
        try:
            yield
        finally:
            cache_dit.disable_cache(pipe)
        return
    made = {"first-block": lambda: diffusers.FirstBlockCacheConfig(**options),
            "mag": lambda: diffusers.MagCacheConfig(**{"num_inference_steps": steps, **options}),
            # By attention modules, its default, it would keep tensors of every layer, and finds none in Wan.
            "taylor": lambda: diffusers.TaylorSeerCacheConfig(**{"use_lite_mode": True, **options})}[cache]()
    models = transformers(pipe)
    for model in models:
        model.enable_cache(made)
    try:
        yield
    finally:
        for model in models:
            model.disable_cache()


if __name__ == "__main__":
    print("This is a module of examples/fastest.py, which says what it can do: --help.")
