"""A stand-in for what SSTA calls of ComfyUI, after 0.3.64, 0.33 and 0.38: its ModelPatcher, its attention function and three small models.

Names, signatures and the order of things are ComfyUI's (comfy/model_patcher.py, comfy/patcher_extension.py, comfy/ldm/modules/attention.py
and the models' own files); tests/tools/comfy_laws.py runs the same laws against the real ones.
"""

import copy

import torch
from torch import Tensor, nn

SIGMAS = (1.0, 0.8, 0.5, 0.2, 0.0)


class AttentionTensorContainer:
    """What 0.38's Wan hands its queries, keys and values over in, so that attention can free them."""

    def __init__(self, tensor):
        self.tensor = tensor

    def take(self):
        tensor, self.tensor = self.tensor, None
        assert tensor is not None, "taken twice"
        return tensor


def _wrapped(func):
    def wrapper(*args, preferred_attention=None, **kwargs):
        options = kwargs.get("transformer_options")
        args = tuple(x.take() if isinstance(x, AttentionTensorContainer) else x for x in args)
        if "_inside_attn_wrapper" not in kwargs:
            kwargs["_inside_attn_wrapper"] = True
            if options is not None and "optimized_attention_override" in options:
                return options["optimized_attention_override"](func, *args, **kwargs)
        return func(*args, **kwargs)
    return wrapper


@_wrapped
def optimized_attention(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
    if not skip_reshape:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    if mask is not None and mask.ndim == 3:
        mask = mask[:, None]
    out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=kwargs.get("scale"))
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


class Executor:
    """WrapperExecutor: each wrapper gets the executor of the rest."""

    def __init__(self, original, class_obj, wrappers):
        self.original, self.class_obj, self.wrappers = original, class_obj, wrappers

    def __call__(self, *args, **kwargs):
        if not self.wrappers:
            return self.original(*args, **kwargs)
        first, *rest = self.wrappers
        return first(Executor(self.original, self.class_obj, rest), *args, **kwargs)


def _wrappers(kind: str, options: dict) -> list:
    return [wrapper for of in options.get("wrappers", {}).get(kind, {}).values() for wrapper in of]


class DiffusionModel(nn.Module):
    """One of the transformers: forward goes through the wrappers to _forward, in the order of its arguments."""

    def forward(self, x, timestep, context, *args, transformer_options=None, **kwargs):
        options = {} if transformer_options is None else transformer_options
        executor = Executor(self._forward, self, _wrappers("diffusion_model", options))
        return executor(x, timestep, context, *self.rest(kwargs), options, **kwargs)

    def rest(self, kwargs: dict) -> list:
        """The positional arguments between context and transformer_options."""
        return []


class WanModel(DiffusionModel):
    patch_size = (1, 2, 2)

    def __init__(self, dim: int = 128, layers: int = 3, indexed: bool = True) -> None:
        super().__init__()
        self.dim, self.heads, self.indexed = dim, 2, indexed
        self.embed, self.cross = nn.Conv3d(4, dim, self.patch_size, self.patch_size), nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(layers))
        self.ref_conv = nn.Conv2d(4, dim, 2, 2)

    def rest(self, kwargs):
        return [kwargs.pop("clip_fea", None), kwargs.pop("time_dim_concat", None)]

    def _forward(self, x, timestep, context, clip_fea=None, time_dim_concat=None, transformer_options={}, **kwargs):  # noqa: B006
        h, w = x.shape[-2:]
        x = nn.functional.pad(x, (0, w % 2, 0, h % 2))
        if time_dim_concat is not None:
            x = torch.cat([x, time_dim_concat], 2)
        x = self.embed(x)
        if self.indexed:
            transformer_options["grid_sizes"] = kwargs.get("grid", x.shape[2:])
        x = x.flatten(2).transpose(1, 2)
        if kwargs.get("reference_latent") is not None:
            x = torch.cat([self.ref_conv(kwargs["reference_latent"]).flatten(2).transpose(1, 2), x], 1)
        for i, block in enumerate(self.blocks):
            if self.indexed:
                transformer_options["block_index"] = i
            q, k, v = block(x).chunk(3, -1)
            if self.indexed:
                q, k, v = map(AttentionTensorContainer, (q, k, v))
            x = x + optimized_attention(q, k, v, heads=self.heads, preferred_attention=None, transformer_options=transformer_options)
            x = x + optimized_attention(self.cross(x), context, context, heads=self.heads, transformer_options=transformer_options)
        return x


class Joint(nn.Linear):
    """A block of HunyuanVideo; before version 1.5 it said that the video comes first."""

    def __init__(self, dim: int, flipped: bool) -> None:
        super().__init__(dim, 3 * dim)
        if flipped:
            self.flipped_img_txt = True


class HunyuanVideo(DiffusionModel):
    def __init__(self, dim: int = 64, patch: tuple[int, ...] = (1, 1, 1), flipped: bool = False) -> None:
        super().__init__()
        self.hidden_size, self.heads, self.patch_size, self.flipped = dim, 2, list(patch), flipped
        self.embed = (nn.Conv3d if len(patch) == 3 else nn.Conv2d)(4, dim, patch, patch)
        self.double_blocks = nn.ModuleList(Joint(dim, flipped) for _ in range(2))
        self.single_blocks = nn.ModuleList(Joint(dim, flipped) for _ in range(2))
        self.vision_in = nn.Identity()
        self.byt5_in = nn.Identity()

    def _forward(self, x, timestep, context, transformer_options={}, txt_byt5=None, attention_mask=None, **kwargs):  # noqa: B006
        video = self.embed(x).flatten(2).transpose(1, 2)
        text = context if txt_byt5 is None else torch.cat([txt_byt5, context], 1)
        mask = bias = None
        if attention_mask is not None:
            bias = attention_mask if attention_mask.is_floating_point() else (attention_mask - 1).to(x.dtype) * torch.finfo(x.dtype).max
        text = text + optimized_attention(text, text, text, self.heads, mask=None if bias is None else bias[:, None],
                                          transformer_options=transformer_options)
        if bias is not None:
            zeros = x.new_zeros(len(bias), video.shape[1])
            mask = torch.cat([zeros, bias] if self.flipped else [bias, zeros], 1)[:, None]
        x = torch.cat([video, text] if self.flipped else [text, video], 1)
        for kind, blocks in (("double", self.double_blocks), ("single", self.single_blocks)):
            for i, block in enumerate(blocks):
                transformer_options.update(block_type=kind, block_index=i)
                q, k, v = block(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
                x = x + optimized_attention(q, k, v, self.heads, skip_reshape=True, mask=mask, transformer_options=transformer_options)
        return x[:, : video.shape[1]] if self.flipped else x[:, -video.shape[1]:]


class LTXVModel(DiffusionModel):
    """Its mask is of cross-attention; of guiding frames, which are the last ones, ``dropped`` tokens are left out."""

    def __init__(self, dim: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.inner_dim, self.heads = dim, 2
        self.patchifier = nn.Module()
        self.patchifier.patch_size = (1, 1, 1)
        self.embed, self.cross = nn.Linear(4, dim), nn.Linear(dim, dim)
        self.transformer_blocks = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(layers))

    def rest(self, kwargs):
        return [kwargs.pop("attention_mask", None), kwargs.pop("frame_rate", 25)]

    def _forward(self, x, timestep, context, attention_mask, frame_rate=25, transformer_options={}, keyframe_idxs=None,  # noqa: B006
                 dropped=0, **kwargs):
        x = self.embed(x.flatten(2).transpose(1, 2))
        x = x[:, : x.shape[1] - dropped]
        for i, block in enumerate(self.transformer_blocks):
            transformer_options["block_index"] = i
            q, k, v = block(x).chunk(3, -1)
            x = x + optimized_attention(q, k, v, self.heads, attn_precision=None, transformer_options=transformer_options)
            x = x + optimized_attention(self.cross(x), context, context, self.heads, attention_mask,
                                        transformer_options=transformer_options)
        return x


class Patcher:
    """ModelPatcher, as far as nodes use it; ``run`` is what a sampler does at one step."""

    def __init__(self, diffusion: nn.Module) -> None:
        self.diffusion, self.model_options = diffusion, {"transformer_options": {}}
        self.wrappers, self.callbacks, self.attachments = {}, {}, {}

    def clone(self) -> "Patcher":
        new = Patcher(self.diffusion)
        new.model_options = copy.deepcopy(self.model_options)
        for name in ("wrappers", "callbacks"):
            setattr(new, name, {kind: {key: list(of) for key, of in keys.items()} for kind, keys in getattr(self, name).items()})
        new.attachments = dict(self.attachments)
        return new

    def get_model_object(self, name: str) -> nn.Module:
        assert name == "diffusion_model"
        return self.diffusion

    def add_wrapper_with_key(self, kind, key, wrapper):
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, kind, key):
        self.wrappers.get(kind, {}).pop(key, None)

    def add_callback_with_key(self, kind, key, callback):
        self.callbacks.setdefault(kind, {}).setdefault(key, []).append(callback)

    def remove_callbacks_with_key(self, kind, key):
        self.callbacks.get(kind, {}).pop(key, None)

    def set_attachments(self, key, attachment):
        self.attachments[key] = attachment

    def get_attachment(self, key):
        return self.attachments.get(key)

    def remove_attachments(self, key):
        self.attachments.pop(key, None)

    def pre_run(self) -> None:
        for callbacks in self.callbacks.get("on_pre_run", {}).values():
            for callback in callbacks:
                callback(self)

    @torch.no_grad()
    def run(self, x: Tensor, context: Tensor, sigma: float = 0.5, sigmas: tuple[float, ...] | None = SIGMAS, **conditions) -> Tensor:
        options = {**self.model_options["transformer_options"], "wrappers": self.wrappers, "sigmas": torch.tensor([sigma])}
        if sigmas is not None:
            options["sample_sigmas"] = torch.tensor(sigmas)

        def apply_model(x, t, c_concat=None, c_crossattn=None, control=None, transformer_options={}, **kwargs):  # noqa: B006
            return self.diffusion(x, t, context=c_crossattn, transformer_options=transformer_options, **kwargs)
        return Executor(apply_model, self, _wrappers("apply_model", options))(
            x, torch.tensor([sigma]), None, context, None, options, **conditions)
