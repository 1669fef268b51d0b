"""A small video model: a PCA of blocks of pixels for an autoencoder, a Wan transformer over its latents, and the file that holds both."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import torch
from arguments import Unusable
from clips import Clip
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

# Pixels of a latent along t, h and w; tokens of a condition, and their width.
BLOCK = (4, 8, 8)
LABEL_TOKENS, LABEL_WIDTH = 4, 128
# What a training canvas shows: the clip itself, a quarter of its picture, or all of it at half the resolution.
WHOLE, CROP, HALVED = range(3)
# What the noise levels of training and of sampling are shifted by, towards noise.
SHIFT = 3.0
FORMAT = 1


@dataclass(frozen=True)
class ModelSize:
    """How large model, canvas and training set are.

    Attributes:
        canvas: tokens along t, h, w; even along h and w.
        channels: of a latent.
        layers, width, head_dim, ffn: of the transformer; width / head_dim heads.
        batch, small_batch: samples a step of training, of whole and of quarter canvases.
        clips, held: to train on, and held out.
    """

    canvas: tuple[int, int, int]
    channels: int
    layers: int
    width: int
    head_dim: int
    ffn: int
    batch: int
    small_batch: int
    clips: int
    held: int

    @property
    def pixels(self) -> tuple[int, int, int]:
        """Frames, height and width of a video."""
        t, h, w = (tokens * size for tokens, size in zip(self.canvas, BLOCK))
        return t, h, w

    @property
    def tokens(self) -> int:
        return prod(self.canvas)


# 20 million parameters over 11,520 tokens: in five minutes on an H200 its samples look like the clips. A checkpoint has 45 MB.
FULL = ModelSize((12, 24, 40), channels=24, layers=8, width=384, head_dim=64, ffn=1536, batch=4, small_batch=16, clips=12, held=6)
# 7 million over as many tokens: trained in twice the speed, for what needs several trainings, or GPUs of all kinds.
LIGHT = ModelSize((12, 24, 40), channels=24, layers=6, width=256, head_dim=64, ffn=1024, batch=4, small_batch=16, clips=12, held=2)
TOY = ModelSize((4, 8, 8), channels=8, layers=2, width=64, head_dim=32, ffn=64, batch=2, small_batch=4, clips=4, held=2)


class PatchAutoencoder(nn.Module):
    """The leading principal components of blocks of 4 x 8 x 8 pixels, scaled towards equal variances."""

    def __init__(self, mean: Tensor, basis: Tensor, scale: Tensor) -> None:
        """``mean [768]``, ``basis [768, C]`` and ``scale [C]``, float32."""
        super().__init__()
        for name, x in (("mean", mean), ("basis", basis), ("scale", scale)):
            self.register_buffer(name, x)

    @classmethod
    def fit(cls, clips: list[Clip], channels: int, generator: torch.Generator) -> PatchAutoencoder:
        """From up to 8,000 blocks of every clip."""
        # In float64: the smallest variances are a millionth of the largest.
        blocks = torch.cat([_sampled(clip, generator) for clip in clips])
        mean = blocks.mean(0)
        centred = blocks - mean
        values, vectors = torch.linalg.eigh((centred.T @ centred / len(blocks)).cpu())
        values, vectors = values.flip(0)[:channels].clamp(min=1e-8), vectors.flip(1)[:, :channels]
        # The first components keep more variance than the last, as the latents of real autoencoders do; one on average.
        scale = values ** -0.3
        scale = scale / (values * scale**2).mean().sqrt()
        return cls(*(x.float().to(blocks.device) for x in (mean, vectors, scale)))

    def encode(self, video: Tensor) -> Tensor:
        """``[B, 3, F, H, W]`` in [-1, 1] -> latents ``[B, C, F / 4, H / 8, W / 8]``."""
        return ((_blocks(video) - self.mean) @ self.basis * self.scale).permute(0, 4, 1, 2, 3).contiguous()

    def decode(self, latents: Tensor) -> Tensor:
        """Latents ``[B, C, T, H, W]`` -> frames ``[B, 4 T, 3, 8 H, 8 W]`` in [0, 1]."""
        b, _, t, h, w = latents.shape
        x = (latents.float().permute(0, 2, 3, 4, 1) / self.scale) @ self.basis.T + self.mean
        x = x.reshape(b, t, h, w, 3, *BLOCK).permute(0, 1, 5, 4, 2, 6, 3, 7)
        return (x.reshape(b, t * BLOCK[0], 3, h * BLOCK[1], w * BLOCK[2]) / 2 + 0.5).clamp(0, 1)


def _blocks(video: Tensor) -> Tensor:
    b, c, f, h, w = video.shape
    (pt, ph, pw) = BLOCK
    x = video.reshape(b, c, f // pt, pt, h // ph, ph, w // pw, pw)
    return x.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4)


def _sampled(clip: Clip, generator: torch.Generator) -> Tensor:
    _, f, h, w = clip.frames.shape
    sizes = (n // size * size for n, size in zip((f, h, w), BLOCK))
    blocks = _blocks(pixels(clip.take(*sizes, generator)[None])).flatten(0, 3)
    return blocks[torch.randperm(len(blocks), generator=generator)[:8000].to(blocks.device)].double()


def pixels(frames: Tensor) -> Tensor:
    """uint8 -> float32 in [-1, 1]."""
    return frames.float() / 127.5 - 1


class VideoModel(nn.Module):
    """The transformer with what it is conditioned on: learned tokens for every training clip, for no clip (the last label), and for what
    the canvas shows of it."""

    def __init__(self, size: ModelSize, clips: int) -> None:
        super().__init__()
        self.size, self.no_clip = size, clips
        self.dit = WanTransformer3DModel(
            patch_size=(1, 1, 1), num_attention_heads=size.width // size.head_dim, attention_head_dim=size.head_dim,
            in_channels=size.channels, out_channels=size.channels, text_dim=LABEL_WIDTH, freq_dim=256, ffn_dim=size.ffn,
            num_layers=size.layers, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=max(64, *size.canvas))
        self.labels = nn.Embedding(clips + 1, LABEL_TOKENS * LABEL_WIDTH)
        self.shown = nn.Embedding(3, LABEL_WIDTH)
        # Velocities begin at zero, their mean.
        nn.init.zeros_(self.dit.proj_out.weight)
        nn.init.zeros_(self.dit.proj_out.bias)

    def condition(self, labels: Tensor, shown: int = WHOLE) -> Tensor:
        """``[B, 5, 128]`` for labels int64 ``[B]``."""
        kind = self.shown(torch.full_like(labels, shown))
        return torch.cat([self.labels(labels).unflatten(1, (LABEL_TOKENS, LABEL_WIDTH)), kind[:, None]], 1)

    def forward(self, x: Tensor, sigma: Tensor, condition: Tensor) -> Tensor:
        """The velocity (noise minus latents) at noise level ``sigma [B]`` in [0, 1], of latents ``[B, C, T, H, W]``."""
        return self.dit(x, sigma * 1000, condition, return_dict=False)[0]

    def as_loaded(self, dtype: torch.dtype) -> VideoModel:
        """This model, ready to sample, with its weights in the dtypes that ``from_pretrained(dtype=dtype)`` gives a transformer."""
        wide = self.dit._keep_in_fp32_modules or ()
        for name, parameter in self.dit.named_parameters():
            if not any(part in name.split(".") for part in wide):
                parameter.data = parameter.data.to(dtype)
        return self.eval().requires_grad_(False)


@dataclass
class Checkpoint:
    """A trained model and what is needed to measure it; all that a run without its clips has.

    Attributes:
        size, state: of the model; weights bfloat16, by name.
        autoencoder: its three tensors.
        held: bfloat16 latents ``[N, C, T, H, W]`` that were not trained on; shown: of the first two clips in ``label_order``.
        clips, source: what was trained on, by name, and where from.
        train_seed: which clips were chosen, and everything random in training.
        seconds, steps: of training so far; complete: whether that is all.
    """

    size: ModelSize
    state: dict[str, Tensor]
    autoencoder: dict[str, Tensor]
    held: Tensor
    shown: Tensor
    clips: list[str]
    source: str
    train_seed: int
    seconds: float
    steps: int
    complete: bool

    def keep(self, model: VideoModel, seconds: float, steps: int, complete: bool) -> None:
        """Takes over the weights of ``model``."""
        self.state = {name: x.detach().to("cpu", torch.bfloat16, copy=True) for name, x in model.state_dict().items()}
        self.seconds, self.steps, self.complete = seconds, steps, complete

    def model(self, device: torch.device) -> VideoModel:
        """The model in float32 as it was kept."""
        model = VideoModel(self.size, len(self.clips))
        model.load_state_dict({name: x.float() for name, x in self.state.items()})
        return model.to(device)

    def patches(self, device: torch.device) -> PatchAutoencoder:
        return PatchAutoencoder(**self.autoencoder).to(device)

    def save(self, path: Path) -> None:
        """In one step, so that a stop in the middle leaves the file that was there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        rest = {name: value for name, value in vars(self).items() if name != "size"}
        beside = path.with_name(path.name + ".new")
        torch.save({"format": FORMAT, "size": asdict(self.size), **rest}, beside)
        beside.replace(path)

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Raises Unusable where ``path`` is not such a file."""
        try:
            held = torch.load(path, map_location="cpu", weights_only=True)
            found = held.pop("format")
            size = ModelSize(**held.pop("size"))
        except Exception as error:
            raise Unusable(f"--checkpoint {path} must be a file that this script wrote, got one that cannot be read: {error}") from error
        if found != FORMAT:
            raise Unusable(f"--checkpoint {path} must be of format {FORMAT}, got {found}")
        return cls(size, **held)


def label_order(clips: int) -> list[int]:
    """The labels in the order in which videos are sampled: neighbours far apart, the first and the middle one before all others."""
    half = -(-clips // 2)
    return sorted(range(clips), key=lambda i: (i % half, i))
