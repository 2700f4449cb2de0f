"""Pretraining: windows, losses, resume."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from learners.pretrain import PretrainConfig, batch_loss, make_windows, pretrain
from wamrl_ray.policy.bases import load_base
from wamrl_ray.policy.wam import WAM, WAMConfig
from wamrl_ray.types import Demonstration

TINY = PretrainConfig(
    policy=WAMConfig.debug(), video_steps=2, action_steps=4, batch_size=4, save_every=2, held_out_every=3, threads=1
)


def demonstration(seed: int, steps: int = 11, every: int = 2) -> Demonstration:
    """Frames, states and labels that say which env step they belong to."""
    rng = np.random.default_rng(seed)
    obs_step = np.arange(0, steps, every, dtype=np.int32)
    return Demonstration(
        env="reach", simulator="none", task_id=0, init_state_id=seed, seed=seed, instruction="go", success=True,
        frames=np.broadcast_to(obs_step[:, None, None, None, None], (len(obs_step), 1, 32, 32, 3)).astype(np.uint8),
        obs_step=obs_step,
        state=np.stack([np.arange(steps + 1), rng.normal(size=steps + 1)], axis=1).astype(np.float32),
        action=rng.normal(size=(steps, 2)).astype(np.float32),
        label=np.stack([np.arange(steps), rng.normal(size=steps)], axis=1).astype(np.float32),
    )  # fmt: skip


def test_a_window_pairs_each_frame_with_the_labels_that_follow_it() -> None:
    windows = make_windows([demonstration(0), demonstration(1)], WAMConfig.debug())
    assert len(windows) == 12
    at = 4  # fifth capture of the first demonstration: env step 8 of 11, horizon 4, offsets (2, 4)
    assert windows.frames[windows.memory[at, 0]].unique().tolist() == [8]
    assert windows.state[at, 0] == 8
    assert windows.action[at, :, 0].tolist() == [8, 9, 10, 10]
    assert windows.next_state[at, :, 0].tolist() == [9, 10, 11, 11]
    assert windows.valid[at].tolist() == [1, 1, 1, 0]
    assert windows.seen[at].tolist() == [1, 0]
    assert windows.frames[windows.future[at, 0]].unique().tolist() == [10]
    assert windows.frames[windows.memory[6, 0]].unique().tolist() == [0], "windows never cross demonstrations"


def test_memory_frames_are_decisions_apart_and_repeat_the_first() -> None:
    windows = make_windows([demonstration(0)], replace(WAMConfig.debug(), memory=3))
    shown = [[int(windows.frames[i].flatten()[0]) for i in row] for row in windows.memory]
    assert shown[0] == [0, 0, 0] and shown[4] == [0, 4, 8]


def test_frames_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="policy asks"):
        make_windows([demonstration(0)], WAMConfig(resolution=64))


@pytest.mark.parametrize("video_weight", [0.0, 0.2])
def test_the_action_stage_trains_the_world_through_its_features_and_through_its_own_loss(video_weight: float) -> None:
    config = replace(TINY, video_weight=video_weight)
    policy, windows = WAM(config.policy, seed=0), make_windows([demonstration(0)], config.policy)
    loss, _ = batch_loss(policy, windows, torch.tensor([1, 2]), torch.Generator().manual_seed(0), config, action=True)
    loss.backward()
    assert policy.world.proj_in.weight.grad.abs().sum() > 0
    assert (policy.world.proj_out.weight.grad.abs().sum() > 0) == (video_weight > 0)


def test_steps_after_the_end_have_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, windows = WAM(TINY.policy, seed=0), make_windows([demonstration(0)], TINY.policy)
    monkeypatch.setattr(policy, "velocity", lambda context, x, sigma, state: torch.zeros_like(x))

    def loss() -> float:
        picks, generator = torch.tensor([4, 5]), torch.Generator().manual_seed(0)
        return batch_loss(policy, windows, picks, generator, TINY, action=True)[1]["pretrain/action_loss"]

    first = loss()
    windows.action[4, 3] += 100.0
    assert loss() == first
    windows.action[4, 2] += 100.0
    assert loss() > first


def test_a_killed_and_resumed_pretraining_ends_in_the_same_weights(tmp_path: Path) -> None:
    data = [demonstration(seed) for seed in range(3)]
    whole = pretrain(TINY, data, tmp_path / "whole")

    class Killed(Exception):
        pass

    def kill(step: int, metrics: object) -> None:
        if step == 5:
            raise Killed

    with pytest.raises(Killed):
        pretrain(TINY, data, tmp_path / "parts", on_metrics=kill)
    resumed = pretrain(TINY, data, tmp_path / "parts")
    assert whole.export("world").digest == resumed.export("world").digest
    assert whole.export("actor").digest == resumed.export("actor").digest
    shipped = load_base(tmp_path / "parts")
    torch.testing.assert_close(shipped.world.proj_in.weight, resumed.world.proj_in.weight, rtol=1e-3, atol=1e-4)


def test_pretraining_lowers_both_losses(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []
    config = replace(TINY, video_steps=40, action_steps=80, video_every=1000, batch_size=8, warmup_steps=5, lr=3e-3)
    pretrain(config, [demonstration(seed) for seed in range(3)], tmp_path, on_metrics=lambda _, m: rows.append(m))

    def mean(name: str, part: slice) -> float:
        return float(np.mean([row[name] for row in rows[part]]))

    assert mean("pretrain/video_loss", slice(35, 40)) < 0.7 * mean("pretrain/video_loss", slice(0, 3))
    assert mean("pretrain/action_loss", slice(-10, None)) < 0.9 * mean("pretrain/action_loss", slice(40, 50))
