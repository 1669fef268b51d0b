# Comparing


def test_compare_runs_every_configuration_from_the_same_noise_and_leaves_nothing():
    tiny = PIPELINES["wan_2.2"]
    pipe = tiny.build()
    before = latents(pipe, **tiny.call)
    said = []
    sparse = Configuration("sparse", SPARSE, Schedule(dense_steps=0.25))
    results = compare(pipe, [dense(pipe), Configuration("stock", None), sparse, replace(sparse, name="again")],
                      tiny.call | {"num_inference_steps": 4, "output_type": "latent"}, seed=2, say=said.append)
    assert torch.equal(latents(pipe, **tiny.call), before)
    exact, stock, first, again = results
    torch.testing.assert_close(stock.video, before[0])
    assert torch.equal(first.video, again.video) and first.quality == again.quality
    assert exact.quality is None and stock.quality["relative_difference"] < 1e-4 < first.quality["relative_difference"]
    assert exact.density == 1 and stock.density is None and stock.report is None
    with apply_ssta(pipe, SPARSE, schedule=Schedule(dense_steps=0.25)) as handle:
        assert torch.equal(latents(pipe, **tiny.call)[0], first.video)
        runs = handle.report()
        # Of four steps the first transformer takes two, of which one is dense.
        expected = sum((1 + run.density) / 2 if run.layer.startswith("transformer.") else run.density for run in runs) / 4
        assert first.density == pytest.approx(expected)
    assert all(0 < result.seconds < 1 for result in results)
    assert not pipe.transformer._forward_hooks and not pipe.transformer_2._forward_pre_hooks
    assert said[:2] == ["dense: two steps to warm up", "dense: generating"] and len(said) == 8
    lines = table(results).splitlines()
    assert len(lines) == 5 and lines[1].split()[:3] == ["dense", f"{exact.seconds:.3f}", "1.00"] and "100.0%" in lines[1]
    with pytest.raises(ValueError, match="configurations must hold at least one"):
        compare(pipe, [], tiny.call)


def test_the_command(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", lambda name, **options: asked.append((name, options)) or wan_with_frames())
    results = main(["some/model", "--config", "topk=2,tile_thw=2x4x4,kernel_thw=1x1x1,dense_steps=0", "--config", "stock",
                    "--prompt", "a cat", "--height", "96", "--width", "128", "--num-frames", "9", "--steps", "3", "--dtype", "float32"])
    assert asked == [("some/model", {"torch_dtype": torch.float32})]
    assert [result.name for result in results][::2] == ["dense", "stock"] and results[1].video.shape == (9, 3, 96, 128)
    assert 5 < results[1].quality["psnr"] < 100 and 0 < results[1].quality["ssim"] < 1 and results[1].density < 0.7
    out = capsys.readouterr()
    assert out.out.count("\n") == 4 and "PSNR" in out.out and "generating" in out.err


@pytest.mark.parametrize("arguments, message", [
    (["--config", "topk=none"], "topk must be an int"), (["--height", "97"], "height"), (["--steps", "many"], "invalid int")])
def test_mistakes_on_the_command_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", lambda *_, **__: wan_with_frames())
    with pytest.raises(SystemExit):
        main(["some/model", "--dtype", "float32", *arguments])
    assert message in capsys.readouterr().err


def test_a_model_that_is_not_there_and_one_that_is_not_supported(monkeypatch, capsys, tmp_path):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nothing")])
    assert "error:" in capsys.readouterr().err
    pipe = wan_with_frames()
    pipe.transformer = torch.nn.Linear(2, 2)
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", lambda *_, **__: pipe)
    with pytest.raises(SystemExit):
        main(["some/model"])
    assert "model must be one of" in capsys.readouterr().err
