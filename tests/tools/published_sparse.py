"""VSA and SLA against their authors' own code, on a CPU: their Triton kernels run in Triton's interpreter, out and gradients are compared.

    python tests/tools/published_sparse.py [--fastvideo DIR] [--fasth3 DIR] [--sla DIR]

DIR: the folder fastvideo_kernel of FastVideo's package fastvideo-kernel (its sdist has it in python/; 0.3.5 was compared), the folder
fastvideo of its repository (commit 2f3d407 was), and the folder sparse_linear_attention of thu-ml/SLA's main branch (commit d973e55 was).
FastVideo's exact part needs a GPU: plain torch takes its place.
Ends with 1 where anything differs by more than rounding.
"""

import argparse
import importlib
import math
import os
import sys
import types
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch

from ssta import sparse_linear_attention, video_sparse_attention

HEADS, DIM = 2, 64


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("fastvideo", "fasth3", "sla"):
        parser.add_argument(f"--{name}", type=Path, metavar="DIR")
    options = parser.parse_args()
    if not (options.fastvideo or options.fasth3 or options.sla):
        parser.error("--fastvideo, --fasth3 or --sla must be given")
    torch.manual_seed(0)
    worst = 0.0
    if options.fastvideo:
        ops, utils = fastvideo_modules(options.fastvideo)
        for thw, sparsity in (((5, 6, 7), 0.6), ((4, 8, 8), 0.5), ((6, 9, 5), 0.8), ((9, 3, 11), 0.9)):
            q, k, v, gate = (torch.randn(1, HEADS, math.prod(thw), DIM, requires_grad=True) for _ in range(4))
            theirs = fastvideo(ops, utils, q, k, v, gate, thw, sparsity)
            ours = video_sparse_attention(q, k, v, gate, thw, sparsity)
            worst = max(worst, compare(f"VSA {thw}, sparsity {sparsity}", ours, theirs, (q, k, v, gate)))
    if options.fasth3:
        backend = fasth3_module(options.fasth3)
        for thw, sparsity, before in (((5, 6, 7), 0.6, (70, 30, 130)), ((4, 8, 8), 0.5, (64, 5)), ((9, 3, 11), 0.9, ()),
                                      ((6, 9, 5), 0.0, (9,))):
            q, k, v, gate = (torch.randn(1, HEADS, math.prod(thw) + sum(before), DIM, requires_grad=True) for _ in range(4))
            theirs = fasth3(backend, q, k, v, gate, thw, sparsity, before)
            ours = video_sparse_attention(q, k, v, gate, thw, sparsity, before=before)
            worst = max(worst, compare(f"VSA {before}, then {thw}, sparsity {sparsity}", ours, theirs, (q, k, v, gate)))
    if options.sla:
        sys.path.insert(0, str(options.sla.resolve().parent))
        layer = importlib.import_module(f"{options.sla.name}.core").SparseLinearAttention
        for feature_map in ("softmax", "elu", "relu"):
            for q_block, tokens, density in ((64, 256, 0.5), (128, 300, 0.4)):
                module = layer(DIM, density, feature_map, q_block, 64, use_bf16=False)
                for parameter in module.parameters():
                    torch.nn.init.normal_(parameter, std=0.2)
                # Autocast, which is CUDA's there, would do it.
                weight, bias = module.half().proj_l.weight, module.proj_l.bias
                q, k, v = (torch.randn(1, HEADS, tokens, DIM, dtype=torch.float16, requires_grad=True) for _ in range(3))
                theirs = module(q, k, v)
                ours = sparse_linear_attention(q, k, v, weight, bias, density=density, feature_map=feature_map, q_block=q_block)
                worst = max(worst, compare(f"SLA {feature_map}, {tokens} tokens, blocks of {q_block}", ours, theirs,
                                           (q, k, v, weight, bias)))
    sys.exit(worst > 1)


def compare(name, ours, theirs, leaves):
    """The largest error over what is allowed: four roundings of the largest value."""
    dout = torch.randn_like(ours)
    pairs = [(ours, theirs), *zip(torch.autograd.grad(ours, leaves, dout), torch.autograd.grad(theirs, leaves, dout))]
    errors = [float((a.double() - b.double()).abs().max().detach() / b.double().abs().max().detach()) for a, b in pairs]
    print(f"{name}: out {errors[0]:.1e}, gradients {' '.join(f'{error:.1e}' for error in errors[1:])}")
    return max(errors) / (4 * torch.finfo(ours.dtype).eps)


def fastvideo_modules(folder):
    """Its ops and vsa_utils, entered without its ``__init__`` and without what asks for a GPU when it is imported."""
    package = types.ModuleType("fastvideo_kernel")
    package.__path__ = [str(folder)]
    tiles: types.ModuleType = types.ModuleType("fastvideo_kernel.triton_kernels.st_attn_triton")
    tiles.sliding_tile_attention_triton = None
    sys.modules |= {package.__name__: package, tiles.__name__: tiles}
    ops, utils = (importlib.import_module(f"fastvideo_kernel.{name}") for name in ("ops", "vsa_utils"))
    ops.block_sparse_attn = exact_part
    return ops, utils


def exact_part(q, k, v, mask, sizes):
    """Attention to the blocks of ``mask``, of which the first ``sizes`` tokens are real."""
    size = q.shape[2] // len(sizes)
    real = (torch.arange(size) < sizes[:, None]).flatten()
    seen = mask.repeat_interleave(size, -1).repeat_interleave(size, -2) & real
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v, None


def fastvideo(ops, utils, q, k, v, gate, thw, sparsity):
    """Its attention as its backend calls it: tokens into tiles that are padded with zeros, and back."""
    tile, device = utils.VSA_TILE_SIZE, q.device
    order = utils.get_tile_partition_indices(thw, tile, device)
    back = utils.get_reverse_tile_partition_indices(thw, tile, device)
    sizes = utils.construct_variable_block_sizes(thw, tuple(math.ceil(n / size) for n, size in zip(thw, tile)), device).int()
    slots, number = utils.get_non_pad_index(sizes, math.prod(tile)), len(sizes)

    def padded(x):
        return x.new_zeros(1, HEADS, number * math.prod(tile), DIM).index_copy(2, slots, x[:, :, order])

    topk = max(1, min(number, math.ceil((1 - sparsity) * number)))
    out = ops.video_sparse_attn(*map(padded, (q, k, v)), sizes, sizes, topk, block_size=tile, compress_attn_weight=padded(gate))
    return out[:, :, slots][:, :, back]


def fasth3_module(folder):
    """Its backend for MiniMax-H3, entered without the packages around it, and plain torch in the place of its kernel."""
    for name in ("fastvideo", "fastvideo.attention", "fastvideo.attention.backends"):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
    for name, attribute in (("logger", "init_logger"), ("distributed", "get_sp_group")):
        module: types.ModuleType = types.ModuleType(f"fastvideo.{name}")
        setattr(module, attribute, lambda *_: None)
        sys.modules[module.__name__] = module
    backend = importlib.import_module("fastvideo.attention.backends.video_sparse_attn_h3")
    backend.block_sparse_attn_64_bhsd = exact_part
    return backend


def fasth3(backend, q, k, v, gate, thw, sparsity, before):
    metadata = backend.MiniMaxH3VSAMetadataBuilder().build(0, thw, (1, 1, 1), sparsity, before, q.device, tile_size=64)
    attention = backend.MiniMaxH3VSAImpl(HEADS, DIM, False, DIM**-0.5)
    padded = attention.preprocess_qkv(torch.cat([x.transpose(1, 2) for x in (q, k, v, gate)]), metadata)
    return attention.postprocess_output(attention.forward(*padded.chunk(4), metadata), metadata).transpose(1, 2)


if __name__ == "__main__":
    main()
