"""Launch configurations that depend on how much there is to do."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from ssta.kernels import device
from ssta.kernels.device import HOPPER_SHARED_MEMORY, DeviceLimits
from ssta.kernels.hopper.config import hopper_forward_config, split
from ssta.kernels.portable.config import forward_config
from ssta.kernels.routing import choose_route


@pytest.mark.parametrize("tokens, heads, head_dim, warpgroups", [
    (15_360, 1, 128, 2), (15_360, 1, 64, 2), (11_520, 1, 128, 3), (11_520, 16, 128, 3), (23_040, 1, 128, 3), (46_080, 16, 128, 3)])
def test_the_hopper_forward_has_small_programs_where_large_ones_would_leave_multiprocessors_idle(tokens, heads, head_dim, warpgroups):
    """Blocks of 384 tokens on the 132 multiprocessors of an H200; without a number of blocks the larger programs."""
    block = 384
    chosen = hopper_forward_config(head_dim, block, block, False, True, blocks=heads * tokens // block, processors=132)
    assert chosen.warpgroups == warpgroups and hopper_forward_config(head_dim, block, block, False, True).warpgroups == 3
    assert hopper_forward_config(head_dim, block, block, True, blocks=heads * tokens // block, processors=132).warpgroups == 2


@pytest.mark.parametrize("major, shared, products, tma", [
    (8, 99, "mma", False), (9, 227, "wgmma", True), (10, 227, "tcgen05", True), (12, 99, "mma", True)])
def test_rtx_50_has_tma_and_multiplies_as_ampere_does(major, shared, products, tma, monkeypatch):
    """And what multiplies in registers has eight warps for 128 rows of 128 entries, where Hopper has four."""
    properties = SimpleNamespace(shared_memory_per_block_optin=shared << 10, major=major, multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    limits = device._device_limits.__wrapped__(0)
    assert limits == DeviceLimits(shared << 10, tma, products=products) and limits.asynchronous == (products != "mma")
    config = forward_config(128, 384, 384, limits)
    assert (config.block_m, config.num_warps) == (128, 4 if limits.asynchronous else 8)


def test_what_a_gpu_says_is_a_constant_to_a_compiler(monkeypatch):
    """It warns of functions that keep their results, and traces them without."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    fresh = {name: device.asked_once(lambda index, value=value: value) for name, value in
             (("_capability", (9, 0)), ("_device_limits", DeviceLimits(227 << 10, True, multiprocessors=132)))}
    for name, answer in fresh.items():
        monkeypatch.setattr(device, name, answer)

    def call(x):
        gpu = torch.device("cuda")
        chosen = choose_route("auto", gpu, torch.bfloat16, 128)
        return x + device.multiprocessors(gpu) + device.device_limits(gpu).shared_memory, chosen.name

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, name = torch.compile(call, backend="eager", fullgraph=True)(torch.zeros(1))
    assert float(out) == 132 + (227 << 10) and name == "hopper"


@pytest.mark.parametrize("tiles, chunks, expected", [
    (60, 72, (60, 2)), (90, 36, (0, 1)), (132, 72, (0, 1)), (144, 24, (12, 4)), (3840, 24, (12, 4)), (60, 11, (0, 1)),
    (132 * 40 + 60, 72, (0, 1))])
def test_the_last_tiles_are_split_where_multiprocessors_would_idle(tiles, chunks, expected):
    """Into as many parts as there are multiprocessors for, none of them too short to pay, and not after many rounds."""
    assert split(tiles, chunks, 132, False) == expected and split(tiles, chunks, 132, True) == (0, 1)


def test_the_hopper_forward_has_smaller_steps_over_short_ragged_blocks():
    """Where a chunk of 128 keys would often be half empty."""
    sizes = [hopper_forward_config(128, 128, kv_block, False, True, ragged=ragged).chunk
             for kv_block in (64, 128, 256) for ragged in (False, True)]
    assert sizes == [64, 64, 128, 64, 128, 128]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_block", [64, 128, 384])
@pytest.mark.parametrize("optimistic", [False, True])
def test_blocks_of_up_to_64_queries_have_programs_of_one_warpgroup(head_dim, kv_block, optimistic):
    """Several of which a multiprocessor has room for, so that no warpgroup is without rows; causal ones stay as they are."""
    config = hopper_forward_config(head_dim, 64, kv_block, False, optimistic)
    kept = (64 + 2 * config.stages * config.chunk) * head_dim * 2
    assert (config.warpgroups, config.programs) == (1, 2 if head_dim == 128 else 3)
    # A multiprocessor keeps a KiB of each program for itself, and barriers and tiles take some hundred bytes.
    assert config.programs * (kept + 1700) <= HOPPER_SHARED_MEMORY + 1024
    others = [hopper_forward_config(head_dim, rows, kv_block, causal, optimistic) for rows, causal in ((65, False), (64, True))]
    assert all(other.warpgroups > 1 and other.programs == 1 for other in others)
    # Where blocks may be shorter than a chunk, several fill one.
    assert (config.pieces, hopper_forward_config(head_dim, 64, kv_block, False, optimistic, ragged=True).pieces) == (1, 4)
