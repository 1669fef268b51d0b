"""Videos to look at and to measure: files, relative difference, PSNR, SSIM, and LPIPS where that package is installed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from diffusers.utils import export_to_video
from torch import Tensor


def require_video_writer() -> None:
    """Raises ValueError where ``write_video`` would find nothing to write with: better before a long generation than after it."""
    if any(importlib.util.find_spec(package) is None for package in ("imageio", "imageio_ffmpeg")):
        raise ValueError("videos are written with imageio, which is not installed: pip install imageio imageio-ffmpeg")


def write_video(video: Tensor, path: str, fps: int) -> None:
    """Frames ``[F, 3, H, W]`` in [0, 1] as a file."""
    export_to_video(list(video.float().permute(0, 2, 3, 1).cpu().numpy()), path, fps=fps)


def relative_difference(video: Tensor, reference: Tensor) -> float:
    """||video - reference|| / ||reference||, of anything of one shape; 0 where both are zero."""
    _require_alike(video, reference)
    reference = reference.double()
    difference = float((video.double() - reference).norm())
    return difference / float(reference.norm()) if difference else 0.0


def psnr(video: Tensor, reference: Tensor, device: torch.device | None = None) -> float:
    """Peak signal-to-noise ratio in dB of frames ``[F, C, H, W]`` in [0, 1]: the mean over the frames that are not the same; inf where all
    are. The first frame often is the same where a video begins with a given image.

    Args:
        video, reference: what is compared.
        device: where each frame is compared; default where ``video`` is. The same for ``ssim`` and ``lpips_distance``.
    """
    values = [-10 * math.log10(error) for x, y in _frames(video, reference, device)
              if (error := float((x.double() - y.double()).square().mean()))]
    return sum(values) / len(values) if values else math.inf


def ssim(video: Tensor, reference: Tensor, device: torch.device | None = None) -> float:
    """Structural similarity of frames ``[F, C, H, W]`` in [0, 1], the mean over all windows, channels and frames.

    Wang et al., Image quality assessment: from error visibility to structural similarity, 2004: Gaussian windows of 11 x 11 with a standard
    deviation of 1.5, K1 = 0.01, K2 = 0.03.
    """
    pairs = _frames(video, reference, device)
    if min(video.shape[2:]) < 11:
        raise ValueError(f"video must have frames of at least 11 x 11 for SSIM, got {tuple(video.shape)}")
    bell = torch.exp(-torch.arange(-5, 6, dtype=torch.float32, device="cpu").square() / (2 * 1.5**2))
    bell = bell.to(video.device if device is None else device)
    bell = bell / bell.sum()
    total = 0.0
    # A frame at a time, because five blurred copies of a whole video are large.
    for x, y in pairs:
        x, y = x.float(), y.float()
        images = torch.stack([x, y, x * x, y * y, x * y]).flatten(0, 1)[:, None]
        blurred = torch.nn.functional.conv2d(torch.nn.functional.conv2d(images, bell.view(1, 1, 11, 1)), bell.view(1, 1, 1, 11))
        mean_x, mean_y, square_x, square_y, product = blurred.unflatten(0, (5, -1))
        variance_x, variance_y, covariance = square_x - mean_x**2, square_y - mean_y**2, product - mean_x * mean_y
        luminance = (2 * mean_x * mean_y + 0.01**2) / (mean_x**2 + mean_y**2 + 0.01**2)
        structure = (2 * covariance + 0.03**2) / (variance_x + variance_y + 0.03**2)
        total += float((luminance * structure).double().mean())
    return total / len(video)


def lpips_available() -> bool:
    return importlib.util.find_spec("lpips") is not None


@lru_cache
def _lpips_network(device: torch.device) -> Any:
    import lpips

    return lpips.LPIPS(net="alex", verbose=False).to(device).eval()


@torch.no_grad()
def lpips_distance(video: Tensor, reference: Tensor, device: torch.device | None = None) -> float:
    """LPIPS (AlexNet), the mean over frames ``[F, C, H, W]`` in [0, 1] of three channels. Needs the package lpips, which loads its
    weights at first use."""
    network = _lpips_network(video.device if device is None else device)
    pairs = _frames(video, reference, device)
    return sum(float(network(x[None].float() * 2 - 1, y[None].float() * 2 - 1)) for x, y in pairs) / len(video)


def _require_alike(video: Tensor, reference: Tensor) -> None:
    if video.shape != reference.shape:
        raise ValueError(f"video must have the reference's shape {tuple(reference.shape)}, got {tuple(video.shape)}")


def _frames(video: Tensor, reference: Tensor, device: torch.device | None) -> Iterator[tuple[Tensor, Tensor]]:
    _require_alike(video, reference)
    if video.dim() != 4:
        raise ValueError(f"video must be frames [F, C, H, W], got shape {tuple(video.shape)}")
    device = video.device if device is None else device
    return ((x.to(device), y.to(device)) for x, y in zip(video, reference))


def describe(video: Tensor, reference: Tensor, device: torch.device | None = None) -> dict[str, float | None]:
    """All of the above by name; what does not apply to latents, or is not installed, is None."""
    frames = video.dim() == 4 and video.shape[1] == 3 and min(video.shape[2:]) >= 11
    return {"relative_difference": relative_difference(video, reference), "psnr": psnr(video, reference, device) if frames else None,
            "ssim": ssim(video, reference, device) if frames else None,
            "lpips": lpips_distance(video, reference, device) if frames and lpips_available() else None}
