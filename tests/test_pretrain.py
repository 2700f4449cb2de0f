"""Pretraining: windows, batches, losses and validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from learners.pretrain_batch import Batch, make_batch, shift_images
from learners.pretrain_check import Imagined, imagine, sample_windows, validate
from learners.pretrain_config import PretrainConfig
from learners.pretrain_losses import batch_loss
from learners.windows import Windows, make_windows
from wamrl_ray.policy.wam import WAM, WAMConfig
from wamrl_ray.types import Demonstration

TINY = PretrainConfig(
    policy=WAMConfig.debug(), video_steps=2, action_steps=4, batch_size=4, save_every=2, held_out_every=3, log_every=1
)


def demonstration(seed: int, steps: int = 11, every: int = 2, noisy: bool = False) -> Demonstration:
    """Frames, states and labels that say which env step they belong to; noisy ones have random pixels."""
    rng = np.random.default_rng(seed)
    obs_step = np.arange(0, steps, every, dtype=np.int32)
    frames = np.broadcast_to(obs_step[:, None, None, None, None], (len(obs_step), 1, 32, 32, 3)).astype(np.uint8)
    pixels = np.random.default_rng(100 + seed).integers(0, 256, frames.shape).astype(np.uint8)
    return Demonstration(
        env="reach", simulator="none", task_id=seed % 2, init_state_id=seed, seed=seed, success=True,
        instruction=f"go {seed % 2}" if noisy else "go",
        frames=pixels if noisy else frames,
        obs_step=obs_step,
        state=np.stack([np.arange(steps + 1), rng.normal(size=steps + 1)], axis=1).astype(np.float32),
        action=rng.normal(size=(steps, 2)).astype(np.float32),
        label=np.stack([np.arange(steps), rng.normal(size=steps)], axis=1).astype(np.float32),
    )  # fmt: skip


@pytest.fixture(scope="module")
def windows() -> Windows:
    return make_windows([demonstration(seed) for seed in range(3)], TINY.policy)


@pytest.fixture(scope="module")
def noisy() -> Windows:
    return make_windows([demonstration(seed, noisy=True) for seed in range(3)], TINY.policy)


def batch_of(policy: WAM, windows: Windows, picks: list[int], config: PretrainConfig, *, action: bool) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return make_batch(policy, windows, torch.tensor(picks), generator, config, action=action)


# ------------------------------------------------------------------------------------------------ windows


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
    # Per demonstration 5 windows see 2 steps ahead and 4 see 4; a step is 1/127.5 in latent units.
    assert windows.still_error == pytest.approx((10 * 2**2 + 8 * 4**2) / 18 / 127.5**2)


def test_memory_frames_are_decisions_apart_and_repeat_the_first() -> None:
    windows = make_windows([demonstration(0)], replace(WAMConfig.debug(), memory=3))
    shown = [[int(windows.frames[i].flatten()[0]) for i in row] for row in windows.memory]
    assert shown[0] == [0, 0, 0] and shown[4] == [0, 4, 8]


def test_data_of_another_size_and_no_data_are_refused() -> None:
    with pytest.raises(ValueError, match="policy.resolution: the policy asks for frames .* has .* --resolution"):
        make_windows([demonstration(0)], WAMConfig(resolution=64))
    with pytest.raises(ValueError, match="policy.state_dim = 3: a demonstration of reach has 2"):
        make_windows([demonstration(0)], replace(WAMConfig.debug(), state_dim=3))
    with pytest.raises(ValueError, match="none to train on"):
        make_windows([], WAMConfig.debug())


@pytest.mark.parametrize("frames_per_block", [1, 4, 6, 100])
def test_frames_keep_their_order_wherever_a_block_ends(
    frames_per_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learners.windows.BLOCK_BYTES", frames_per_block * 32 * 32 * 3)
    demonstrations = [demonstration(seed, noisy=True) for seed in range(3)]
    expected = np.concatenate([demo.frames for demo in demonstrations])
    assert torch.equal(make_windows(demonstrations, TINY.policy).frames, torch.from_numpy(expected))


def test_demonstrations_are_let_go_once_they_are_read() -> None:
    alive: list[Any] = []

    def stream() -> Iterator[Demonstration]:
        import weakref

        for seed in range(4):
            demo = demonstration(seed)
            alive.append(weakref.ref(demo))
            yield demo
            del demo
            assert sum(ref() is not None for ref in alive) <= 1

    assert len(make_windows(stream(), WAMConfig.debug()).frames) == 24


# ------------------------------------------------------------------------------------------------ batches and losses


def test_a_shift_moves_each_view_and_repeats_its_edge() -> None:
    frames = torch.randint(0, 256, (2, 1, 2, 6, 6, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    shift = torch.zeros(2, 2, 2, dtype=torch.int64)
    shift[:, 1, 0] = torch.tensor([2, -1])  # second sample, first view: two down, one left
    moved = shift_images(frames, shift)
    assert torch.equal(moved[0], frames[0]) and torch.equal(moved[1, :, 1], frames[1, :, 1])
    rows, columns = [0, 0, 0, 1, 2, 3], [1, 2, 3, 4, 5, 5]
    assert torch.equal(moved[1, 0, 0], frames[1, 0, 0][rows][:, columns])


def test_memory_and_future_are_augmented_alike(noisy: Windows) -> None:
    config = replace(TINY, shift=2, brightness=0.5)
    same = replace(noisy, future=noisy.memory.expand(-1, 2))
    batch = batch_of(WAM(TINY.policy), same, [0, 7, 8, 9], config, action=False)
    assert torch.equal(batch.future[:, 0], batch.memory[:, 0])
    assert not torch.equal(batch.memory[:, 0], same.frames[same.memory[[0, 7, 8, 9], 0]])


@pytest.mark.parametrize("video_weight", [0.0, 0.2])
def test_the_action_stage_trains_the_world_through_its_features_and_through_its_own_loss(
    video_weight: float, windows: Windows
) -> None:
    config = replace(TINY, video_weight=video_weight)
    policy = WAM(config.policy, seed=0)
    batch_loss(policy, batch_of(policy, windows, [1, 2], config, action=True), config)[0].backward()
    assert policy.world.proj_in.weight.grad.abs().sum() > 0
    assert (policy.world.proj_out.weight.grad.abs().sum() > 0) == (video_weight > 0)


def test_steps_after_the_end_have_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, windows = WAM(TINY.policy, seed=0), make_windows([demonstration(0)], TINY.policy)
    monkeypatch.setattr(policy, "velocity", lambda context, x, sigma, state: torch.zeros_like(x))

    def loss() -> float:
        terms = batch_loss(policy, batch_of(policy, windows, [4, 5], TINY, action=True), TINY)[1]
        return float(terms["pretrain/action_loss"])

    first = loss()
    windows.action[4, 3] += 100.0
    assert loss() == first
    windows.action[4, 2] += 100.0
    assert loss() > first


@pytest.mark.parametrize("action", [False, True])
def test_mixed_precision_changes_the_networks_arithmetic_alone(
    action: bool, noisy: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = WAM(TINY.policy, seed=0)
    torch.nn.init.normal_(policy.world.proj_out.weight, std=0.02)  # a fresh one predicts 0, in any precision
    batch = batch_of(policy, noisy, [1, 2, 8], TINY, action=action)
    trained = policy.world.proj_in.weight

    def run() -> tuple[dict[str, float], torch.Tensor]:
        policy.zero_grad()
        policy.text.forget()
        loss, terms = batch_loss(policy, batch, TINY)
        loss.backward()
        assert {loss.dtype, *(term.dtype for term in terms.values())} == {torch.float32}
        return {name: float(term) for name, term in terms.items()}, trained.grad.clone()

    def bfloat16(device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16)

    (plain, gradient), text = run(), policy.text("go 0")[0]
    monkeypatch.setattr("learners.pretrain_losses.mixed_precision", bfloat16)
    mixed, mixed_gradient = run()
    assert mixed == pytest.approx(plain, rel=0.02) and all(mixed[name] != plain[name] for name in plain)
    assert torch.nn.functional.cosine_similarity(mixed_gradient.flatten(), gradient.flatten(), dim=0) > 0.99
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert torch.equal(policy.text("go 0")[0], text), "the frozen front end keeps its precision"


def test_a_wrong_recipe_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size = 0: use at least 1"):
        PretrainConfig(batch_size=0)
    with pytest.raises(ValueError, match="ema_decay = 1.5: use a number from 0 to 1"):
        PretrainConfig(ema_decay=1.5)


# ------------------------------------------------------------------------------------------------ validation


def test_a_policy_that_imagines_no_motion_errs_as_much_as_copying(noisy: Windows) -> None:
    policy = WAM(TINY.policy, seed=0)  # its last layer is zero: the residual to the current frame is none
    first, shown = validate(policy, noisy, replace(TINY, shift=2, brightness=0.5), action=True)
    again, _ = validate(policy, noisy, TINY, action=True)
    assert first == again, "no augmentation"
    assert first["pretrain/valid_imagined_to_copied_mse"] == pytest.approx(1.0, abs=1e-5)
    assert shown is not None and shown.offset == 4
    assert sorted(set(shown.instruction)) == ["go 0", "go 1"], "a sample of every instruction"
    torch.testing.assert_close(shown.imagined, shown.now, atol=1e-5, rtol=0)


def test_imagined_frames_stand_beside_their_own_past_and_future(windows: Windows) -> None:
    shown = imagine(WAM(TINY.policy, seed=0), windows, torch.tensor([1, 8]))
    assert (shown.now[:, 0, 0, 0, 0] * 255).round().tolist() == [2, 4]
    assert (shown.future[:, 0, 0, 0, 0] * 255).round().tolist() == [6, 8], "the last offset is 4 steps"


def test_pixel_errors_are_ratios_of_means() -> None:
    now, future = torch.zeros(2, 1, 4, 4, 3), torch.full((2, 1, 4, 4, 3), 0.4)
    shown = Imagined(instruction=("a", "b"), offset=8, now=now, future=future, imagined=torch.full_like(now, 0.3))
    errors = shown.errors()
    assert errors["pretrain/valid_imagined_to_copied_mse"] == pytest.approx(1 / 16)
    assert errors["pretrain/valid_imagined_to_copied_mae"] == pytest.approx(1 / 4)
    assert replace(shown, future=now).errors() == {}


def test_samples_are_the_middle_of_each_instruction_that_has_a_future() -> None:
    plain = make_windows([demonstration(seed, noisy=True) for seed in range(2)], TINY.policy)
    assert sample_windows(plain, torch.tensor([i in (1, 2, 3, 7) for i in range(12)])).tolist() == [1, 2, 3, 7]
    assert sample_windows(plain, torch.ones(12, dtype=torch.bool)).tolist() == [0, 2, 3, 5, 6, 8, 9, 11]
    many = replace(plain, instruction=tuple(f"task {i}" for i in range(12)))
    assert sample_windows(many, torch.ones(12, dtype=torch.bool)).tolist() == list(range(8))
