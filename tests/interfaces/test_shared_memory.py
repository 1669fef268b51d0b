"""Laws of all interfaces: a caller may write to his arguments and to his results, and torch's defaults change no bit.

None of the imitated libraries documents an argument as a live buffer of these functions. The one exception is the documented purpose of
``out`` and ``lse``, whose memory holds the result of the call that they are given to.
"""

import pytest
import torch
from interface_calls import CALLS, WRAPPERS, overwrite, tensors_of

from ssta import interfaces

devices = pytest.mark.parametrize("device, dtype", [
    pytest.param("cpu", torch.float32, id="cpu"), pytest.param("cuda", torch.float16, id="gpu", marks=pytest.mark.gpu)])
every_call = pytest.mark.parametrize("case", CALLS.values(), ids=CALLS.keys())
every_wrapper = pytest.mark.parametrize("case", WRAPPERS.values(), ids=WRAPPERS.keys())


def copies(inputs):
    return {name: x.clone() for name, x in inputs.items()}


def results(result):
    return [x.detach().clone() for x in tensors_of(result)]


def assert_same_bits(first, second):
    assert len(first) == len(second) > 0
    for x, y in zip(first, second):
        assert x.device == y.device and x.dtype == y.dtype and (x.isfinite().any() or not x.numel())
        assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) and x.isnan().equal(y.isnan())


def planned(case, device, dtype):
    buffers = {name: make() for name, make in case.buffers.items()}
    buffers = {name: x.to(device, dtype) if x.is_floating_point() else x.to(device) for name, x in buffers.items()}
    workspace = torch.zeros(1, device=device)
    inputs = [torch.randn(*shape).to(device, dtype) for shape in case.shapes]
    return case.plan(buffers, workspace, dtype), buffers | dict(workspace=workspace), inputs


@devices
@every_wrapper
def test_a_plan_keeps_no_buffer_of_its_caller(case, device, dtype):
    wrapper, buffers, inputs = planned(case, device, dtype)
    expected = results(wrapper.run_return_lse(*inputs))
    for x in buffers.values():
        overwrite(x)
        assert_same_bits(results(wrapper.run_return_lse(*inputs)), expected)


@devices
@every_wrapper
def test_a_plan_hands_out_no_memory_of_its_own(case, device, dtype):
    wrapper, _, inputs = planned(case, device, dtype)
    before = copies(dict(zip("qkv", inputs)))
    first = wrapper.run_return_lse(*inputs)
    expected = results(first)
    for x in tensors_of(first):
        overwrite(x)
    assert_same_bits(results(wrapper.run_return_lse(*inputs)), expected)
    assert_same_bits(inputs, list(before.values()))


@every_wrapper
def test_out_and_lse_are_written_by_their_own_call_alone(case):
    wrapper, _, inputs = planned(case, "cpu", torch.float32)
    expected = results(wrapper.run_return_lse(*inputs))
    out, lse = (torch.empty_like(x) for x in expected)
    assert wrapper.run(*inputs, out=out, lse=lse, return_lse=True) == (out, lse)
    assert_same_bits([out, lse], expected)
    wrapper.run_return_lse(*[x + 1 for x in inputs])
    assert_same_bits([out, lse], expected)


@devices
@every_call
def test_a_result_is_its_callers(case, device, dtype):
    inputs = case.inputs(device, dtype)
    before = copies(inputs)
    first = case.call(**inputs)
    expected = results(first)
    for x in tensors_of(first):
        overwrite(x)
    for name, x in inputs.items():
        assert torch.equal(x, before[name]), name
    assert_same_bits(results(case.call(**inputs)), expected)


@devices
@every_call
def test_arguments_are_read_anew_by_every_call(case, device, dtype):
    inputs, changed = case.inputs(device, dtype), case.inputs(device, dtype)
    case.call(**inputs)
    expected = results(case.call(**changed))
    for name, x in inputs.items():
        x.copy_(changed[name])
    assert_same_bits(results(case.call(**inputs)), expected)


@devices
@pytest.mark.parametrize("case", [case for case in CALLS.values() if case.differentiable],
                         ids=[name for name, case in CALLS.items() if case.differentiable])
def test_a_pattern_that_changes_before_the_backward_is_not_seen_or_refused(case, device, dtype):
    inputs = case.inputs(device, dtype)

    def gradients(write):
        leaves = {name: inputs[name].clone().requires_grad_() for name in case.values}
        pattern = {name: inputs[name].clone() for name in case.pattern}
        out = tensors_of(case.call(**leaves, **pattern))[0]
        for x in pattern.values() if write else ():
            overwrite(x)
        return torch.autograd.grad(out.float().square().sum(), list(leaves.values()))

    expected = gradients(write=False)
    try:
        assert_same_bits(gradients(write=True), expected)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)


@pytest.fixture(params=[("cpu", torch.bfloat16), ("cpu", torch.float64), ("meta", torch.float32)], ids=["bfloat16", "float64", "meta"])
def other_defaults(request):
    """Sets torch's default device and dtype when called."""
    def change():
        torch.set_default_device(request.param[0])
        torch.set_default_dtype(request.param[1])
    yield change
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


@every_call
def test_torchs_defaults_change_no_bit_of_a_call(case, other_defaults):
    inputs = case.inputs()
    expected = results(case.call(**inputs))
    other_defaults()
    assert_same_bits(results(case.call(**inputs)), expected)


@every_wrapper
def test_torchs_defaults_change_no_bit_of_a_plan(case, other_defaults):
    wrapper, buffers, inputs = planned(case, "cpu", torch.float32)
    expected = results(wrapper.run_return_lse(*inputs))
    workspace = buffers.pop("workspace")
    other_defaults()
    assert_same_bits(results(case.plan(buffers, workspace).run_return_lse(*inputs)), expected)


def test_torchs_defaults_change_no_bit_of_the_kernels_for_tokens(other_defaults):
    inputs = CALLS["selected_attention"].inputs("cuda" if torch.cuda.is_available() else "cpu", torch.float16)

    def attend():
        return results(interfaces.selected_attention(
            inputs["q"], inputs["k"], inputs["v"], inputs["block_indices"], block_size=4, return_lse=True, impl="triton"))

    expected = attend()
    other_defaults()
    assert_same_bits(attend(), expected)


def test_every_function_of_every_interface_is_called_here():
    """Aliases and installers aside: their functions are those above."""
    source = "".join(value for case in CALLS.values() for value in case.call.__code__.co_names) + "".join(
        case.wrapper for case in WRAPPERS.values())
    modules = {*interfaces._MODULES, "install", "uninstall", "SparseArgs", "attn_pooling_qk_varlen",
               "block_1d_gqa_sparse_attn_varlen_sim_func"}
    assert {name for name in interfaces.__all__ if name not in modules and name not in source} == set()
