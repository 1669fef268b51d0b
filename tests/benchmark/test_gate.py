"""gate.py: the toy's decibels are what this estimate gives, other estimates take its place by name, and releases are held beside it."""


import pytest
import torch
from rows import read_rows

# Of the toy at 10, 15.6 and 30 % of the pairs, in dB: the same to 0.02 on any number of threads. What changes quality on purpose changes
# them too.
EXPECTED = [38.10, 38.83, 41.02]


@pytest.fixture
def gate(monkeypatch, tmp_path):
    import gate

    monkeypatch.setattr(gate, "RESULTS", tmp_path / "results")
    return gate


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_toy_s_decibels(gate, tmp_path, capsys):
    arguments = ["--device", "cpu", "--checkpoint", str(tmp_path / "model.pt")]
    gate.main([*arguments, "--csv", "gate_mine"])
    rows = read_rows(tmp_path / "results" / "gate_mine.csv")
    assert [float(row["psnr"]) for row in rows] == pytest.approx(EXPECTED, abs=0.1)
    capsys.readouterr()
    # Again, from the checkpoint, beside what is now the last release and beside others, by name.
    gate.main([*arguments, "--estimate", "estimates:flex_top_tiles", f"{__name__}:dense"])
    ours, flex, dense = capsys.readouterr().out.splitlines()[-3:]
    own = ", ".join(f"{float(row['psnr']):.2f} dB" for row in rows)
    assert ours.endswith(f"; release {rows[0]['release']} on the same weights: {own}") and ours.count(own.split(", ")[0]) == 2
    psnr = {text: [float(part.split()[1]) for part in text.split(";")[0].split(": ")[1].split(", ")] for text in (flex, dense)}
    assert 15 < min(psnr[flex]) <= max(psnr[flex]) < 30 and min(psnr[dense]) > 80, (flex, dense)


def dense(q, k, v, thw, density):
    assert q.shape[2] == 256 and thw == (4, 8, 8) and density in (0.1, 0.156, 0.3)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def test_other_weights_are_named(gate):
    def row(psnr, weights):
        return dict(release="0.1", estimate="ssta", density=0.1, psnr=psnr, weights=weights, device="Card", note="")

    text = gate.line("ssta", [row(30.0, "a")], [row("29.5", "b")])
    assert text == "ssta 0.1: 0.1 30.00 dB; release 0.1 on other weights of the same recipe, Card: 29.50 dB"
    assert "failed: no" in gate.line("ssta", [row("", "a") | dict(note="failed: no")], [])


@pytest.mark.parametrize("name", ["estimates", "estimates:none", "no_such_module:f", ":f"])
def test_a_name_of_nothing(gate, name, capsys):
    with pytest.raises(SystemExit):
        gate.main(["--estimate", name, "--device", "cpu"])
    assert "must name a function that can be imported" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_computes_the_pairs_of_whole_tiles():
    from estimates import flex_top_tiles

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 4 * 8 * 8, 16, dtype=torch.float64).unbind()
    torch.testing.assert_close(flex_top_tiles(q, k, v, (4, 8, 8), 1.0), torch.nn.functional.scaled_dot_product_attention(q, k, v))
    # Half of the tiles: each query attends to one of the two.
    out = flex_top_tiles(q, k, v, (4, 8, 8), 0.5).unflatten(2, (4, 8, 8))
    k, v = (x.unflatten(2, (4, 8, 8)) for x in (k, v))
    halves = [torch.nn.functional.scaled_dot_product_attention(q, *(x[:, :, :, rows].flatten(2, 4) for x in (k, v))).unflatten(2, (4, 8, 8))
              for rows in (slice(0, 4), slice(4, 8))]
    for rows in (slice(0, 4), slice(4, 8)):
        for head in range(2):
            assert any(torch.allclose(out[0, head, :, rows], half[0, head, :, rows]) for half in halves)
