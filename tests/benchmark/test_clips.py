"""Clips to train on: videos are cut where they cut, what is held out is never trained on, and procedural scenes are the same everywhere."""

import numpy as np
import pytest
import torch


def moving(length, seed, height=48, width=64, speed=1):
    """A picture that slides, uint8 ``[F, H, W, 3]``."""
    noise = np.random.default_rng(seed).integers(0, 256, (height // 8, (width + speed * length) // 8 + 1, 3), np.uint8)
    picture = noise.repeat(8, 0).repeat(8, 1)
    return np.stack([picture[:, speed * i:speed * i + width] for i in range(length)])


@pytest.fixture
def clips(monkeypatch):
    """The module, reading "videos" that are numpy's files."""
    import clips

    monkeypatch.setattr(clips, "READERS", {"numpy": lambda path: iter(np.load(path))})
    return clips


def write(path, *shots):
    with path.open("wb") as file:
        np.save(file, np.concatenate(shots))
    return path


def test_windows_lie_between_cuts(clips, tmp_path):
    path = write(tmp_path / "a.mp4", moving(20, 0), moving(9, 1), moving(70, 2), np.zeros((30, 48, 64, 3), np.uint8), moving(12, 3))
    found = [(window.first, window.length) for window in clips.windows_of(path, 10)]
    # One frame is left out on either side of a cut; 9 frames are too few, 68 are three windows, black is still, and the end is no cut.
    assert found == [(0, 19), (30, 22), (52, 23), (75, 23), (130, 11)]


def test_what_moves_fast_is_not_cut(clips, tmp_path):
    calm, wild = moving(30, 0, speed=1), moving(40, 1, speed=5)
    found = [(window.first, window.length) for window in clips.windows_of(write(tmp_path / "a.avi", calm, wild), 20)]
    assert found == [(0, 29), (31, 39)]


def test_a_clip_is_the_video(clips, tmp_path):
    path = write(tmp_path / "a.mp4", moving(20, 0), moving(20, 1))
    frames, = clips.load([clips.Window(path, 21, 10)], 32, 40)
    assert frames.dtype == torch.uint8 and frames.shape[:2] == (3, 10) and 32 < frames.shape[2] < 40 and 40 < frames.shape[3] < 48
    whole, = clips.load([clips.Window(path, 21, 10)], 45, 60)
    assert whole.shape[2:] == (48, 64)
    torch.testing.assert_close(whole, torch.from_numpy(moving(20, 1)[1:11]).permute(3, 0, 1, 2))
    clip = clips.Clip("a", whole)
    assert torch.equal(clip.take(4, 20, 30), whole[:, 3:7, 14:34, 17:47])


def test_what_is_held_out_is_never_trained_on(clips, tmp_path):
    for name in "abcd":
        write(tmp_path / f"{name}.mp4", *(moving(12, ord(name) + 10 * i) for i in range(5)))
    (tmp_path / "notes.txt").write_text("no video")
    names = []
    for seed in range(3):
        found = clips.read_clips(tmp_path, 5, 3, 10, 32, 40, seed)
        assert found.source == tmp_path.name and len(found.train) == 5 and len(found.held) == 3
        names.append([{clip.name for clip in of} for of in (found.train, found.held)])
        assert all(clip.frames.shape[1] >= 10 for clip in found.train + found.held)
        assert len({name[0] for name in names[-1][0]}) == 4, "of every file"
    assert names[0][1] == names[1][1] == names[2][1]
    assert not any(train & names[0][1] for train, _ in names)
    assert names[0][0] != names[1][0] != names[2][0]
    assert len(clips.read_clips(tmp_path, 100, 100, 10, 32, 40, 0).train) == 16


def test_clips_that_cannot_be_used(clips, tmp_path, monkeypatch):
    from arguments import Unusable

    def read():
        return clips.read_clips(tmp_path, 5, 3, 10, 32, 40, 0)

    with pytest.raises(Unusable, match="--clips must be a folder of videos, got .*nowhere"):
        clips.read_clips(tmp_path / "nowhere", 5, 3, 10, 32, 40, 0)
    with pytest.raises(Unusable, match="must hold videos .*.mp4.*, got none"):
        read()
    write(tmp_path / "a.mp4", moving(12, 0), moving(12, 1))
    with pytest.raises(Unusable, match="at least 3 stretches of 10 frames without a cut, got 2"):
        read()
    (tmp_path / "broken.mp4").write_bytes(b"this is no video")
    with pytest.raises(Unusable, match="broken.mp4 cannot be read with numpy beyond frame 0: "):
        read()
    monkeypatch.setattr(clips, "READERS", {"numpy": lambda path: iter(())})
    with pytest.raises(Unusable, match="a.mp4 cannot be read with numpy: it gave no frame"):
        read()
    monkeypatch.setattr(clips.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unusable, match="a.mp4 can be read with cv2 or imageio, and neither is installed: pip install "):
        read()


@pytest.mark.parametrize("package", ["cv2", "imageio"])
def test_real_files(package, tmp_path, monkeypatch):
    import clips

    pytest.importorskip(package)
    cv2 = pytest.importorskip("cv2", reason="cv2 writes the file")
    monkeypatch.setattr(clips, "READERS", {package: clips.READERS[package]})
    path, frames = tmp_path / "a.avi", np.concatenate([moving(15, 0), moving(15, 1)])
    video = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 24, (64, 48))
    for frame in frames:
        video.write(np.ascontiguousarray(frame[:, :, ::-1]))
    video.release()
    read = np.stack(list(clips.frames_of(path)))
    assert read.shape == frames.shape and np.abs(read.astype(float) - frames).mean() < 12, "in the order red, green, blue"
    assert [(window.first, window.length) for window in clips.windows_of(path, 10)] == [(0, 14), (16, 14)]
    (tmp_path / "b.avi").write_bytes(b"this is no video")
    with pytest.raises(clips.Unusable, match="b.avi cannot be read with"):
        list(clips.frames_of(tmp_path / "b.avi"))


def test_procedural_clips_are_the_same_for_the_same_seed():
    from procedural import procedural_clips

    one, again, other = (procedural_clips(2, 1, 8, 32, 40, seed) for seed in (3, 3, 4))
    clips = one.train + one.held
    assert all(torch.equal(a.frames, b.frames) and a.name == b.name for a, b in zip(clips, again.train + again.held))
    assert not any(torch.equal(a.frames, b.frames) for a, b in zip(clips, other.train + other.held))
    assert not torch.equal(clips[0].frames, clips[1].frames)
    for clip in clips:
        assert clip.frames.dtype == torch.uint8 and clip.frames.shape[1] >= 8 and clip.frames.shape[2] > 32 and clip.frames.shape[3] > 40
        steps = clip.frames.float().diff(dim=1).abs().mean((0, 2, 3))
        assert steps.min() > 0.1 and steps.max() < 40, "something moves in every frame, and nothing cuts"
