"""A step in a CUDA graph by torch's own means, as docs/small-canvases.md shows it."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "small-canvases.md"


def blocks():
    return re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.M | re.S)


def test_the_page_is_code():
    assert len(blocks()) == 3
    for code in blocks():
        compile(code, str(PAGE), "exec")


@pytest.mark.gpu
def test_the_pages_code_gives_what_calls_give():
    """A graph's result of other inputs, a compiled one, and a graphed module's gradients."""
    names: dict = {}
    step, compiled, training = blocks()
    exec(step, names)
    with torch.no_grad():
        assert torch.equal(names["out"], names["step"]())
    torch._dynamo.reset()
    exec(compiled, names)
    with torch.no_grad():
        assert torch.equal(names["result"], names["step"]())
    exec(training, names)
    x, attention = names["x"], names["attention"]
    found = [x.grad.clone(), *[parameter.grad.clone() for parameter in attention.parameters()]]
    # The graphed module's own forward is a graph, and its class has the plain one.
    wanted = torch.autograd.grad(type(attention).forward(attention, x).square().mean(), (x, *attention.parameters()))
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b)
