"""The video learner on a network of toy size: what it trains, on what, how far it drifts, and what it keeps."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from learners.batching import decisions_with_future
from learners.video_batch import VideoBatch, join, of_episodes, of_windows
from learners.video_config import Mixed, OutcomeConditioned, PretrainingReplayConfig, VideoSFTConfig
from learners.video_sampling import is_held_out
from learners.video_sft import VideoSFTLearner
from learners.windows import Windows, make_windows
from tests.toy_learning import act, equal, pair_of, picture, tiny, toy_episodes, video
from wamrl_ray.policy.wam import WAMConfig
from wamrl_ray.types import Demonstration, Episode


@pytest.fixture(scope="module")
def episodes() -> list[Episode]:
    return toy_episodes()


def batch_of(episodes: list[Episode], picks: list[tuple[int, int]]) -> VideoBatch:
    return of_episodes(episodes, picks, tiny().spec)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


# ------------------------------------------------------------------------------------------------ training

def test_video_sft_lowers_its_loss_and_trains_the_world_alone(episodes: list[Episode]) -> None:
    learner = video(steps_per_update=40, kl_weight=0.0, lr=1e-2)
    text, expert = copy.deepcopy(learner.policy.text.state_dict()), learner.policy.export("actor").digest
    first = learner.update(episodes[::2], index=0)
    last = [learner.update(episodes[::2], index=index) for index in (1, 2)][-1]
    assert last["video/flow_loss"] < 0.85 * first["video/flow_loss"]
    assert learner.policy.export("actor").digest == expert and equal(text, dict(learner.policy.text.state_dict()))
    assert learner.reference.export("world").digest == tiny().export("world").digest
    assert first["video/steps_count"] == 40 and first["video/windows_count"] == 6


def test_the_kl_weight_changes_the_gradient_and_the_reference_has_none(episodes: list[Episode]) -> None:
    def gradient(weight: float) -> torch.Tensor:
        learner = video()
        learner.probe(episodes)
        with torch.no_grad():  # away from the reference, where the KL has a slope
            for parameter in learner.policy.world.parameters():
                parameter.add_(0.05)
        terms = learner.loss_terms(batch_of(episodes, [(0, 0), (2, 1)]), rng())
        (terms["flow_loss"] + weight * terms["feature_kl_nats"]).backward()
        assert all(p.grad is None for p in learner.reference.parameters())
        return torch.cat([p.grad.flatten() for p in learner.policy.world.parameters() if p.grad is not None])

    assert gradient(0.0).norm() > 0
    assert not torch.equal(gradient(0.0), gradient(1.0))


def test_the_feature_kl_is_zero_at_the_base_and_a_large_weight_freezes_drift(episodes: list[Episode]) -> None:
    drift = {}
    for weight in (0.0, 1e4):
        learner = video(kl_weight=weight, steps_per_update=20)
        learner.probe(episodes)
        base = learner.export().digest
        terms = learner.loss_terms(batch_of(episodes, [(0, 0)]), rng())
        assert abs(terms["feature_kl_nats"].item()) < 1e-3  # the means agree; the variances' EMA has moved a hundredth
        learner.update(episodes[::2], index=0)
        drift[weight] = learner.drift_from(base)
    assert drift[1e4] < 0.1 * drift[0.0]


def test_video_with_lr_zero_changes_nothing(episodes: list[Episode]) -> None:
    learner = video(lr=0)
    learner.probe(episodes)
    before = learner.export().digest
    learner.update(episodes[::2], index=0)
    assert learner.export().digest == before and learner.drift_from(before) == 0.0


def test_without_successes_there_is_no_video_update_and_failures_are_refused(episodes: list[Episode]) -> None:
    learner = video()
    before = learner.export().digest
    assert learner.update([], index=0)["video/steps_count"] == 0
    assert learner.export().digest == before
    with pytest.raises(ValueError, match="did not succeed"):
        learner.update(episodes, index=0)


def test_a_video_update_is_a_function_of_state_episodes_and_index(episodes: list[Episode]) -> None:
    one, other, shifted = video(), video(), video()
    assert one.update(episodes[::2], index=3) == other.update(episodes[::2], index=3)
    shifted.update(episodes[::2], index=4)
    assert one.export().digest == other.export().digest != shifted.export().digest


def test_the_video_state_round_trips_bit_for_bit(episodes: list[Episode]) -> None:
    learner, resumed = video(), video()
    learner.update(episodes[::2], index=0)
    old = learner.export().digest
    resumed.load_state(pickle.loads(pickle.dumps(learner.state())))
    assert equal(resumed.state(), learner.state())
    metrics = learner.update(episodes[::2], index=1)
    assert resumed.update(episodes[::2], index=1) == metrics
    assert resumed.export().digest == learner.export().digest
    assert resumed.drift_from(old) == learner.drift_from(old) > 0
    other = VideoSFTLearner(VideoSFTConfig(), tiny(seed=1), tiny(seed=1), run_seed=0)
    with pytest.raises(ValueError, match="has interface = "):
        other.load_state(learner.state())


def test_drift_is_zero_to_itself_and_forgets_the_longest_unused(episodes: list[Episode]) -> None:
    learner = video(probe_versions=2)
    learner.probe(episodes)
    base = learner.export().digest
    for index in range(2):
        learner.update(episodes[::2], index=index)
        last = learner.export().digest
        assert learner.drift_from(last) == 0.0 and learner.drift_from(base) > 0  # asked for, so kept
    learner.update(episodes[::2], index=2)
    learner.export()
    with pytest.raises(ValueError, match="no remembered world"):
        learner.drift_from(last)


def test_the_video_learner_gives_up_after_repeated_nans(episodes: list[Episode]) -> None:
    learner = video(max_bad_updates=2)
    with torch.no_grad():
        next(learner.policy.world.parameters()).fill_(float("nan"))
    with pytest.raises(RuntimeError, match="video_learner"):
        learner.update(episodes[::2], index=0)

# ------------------------------------------------------------------------------------------------ anchor


def test_drift_from_the_pretrained_world_is_reported_at_every_update_from_before_the_first(
    episodes: list[Episode],
) -> None:
    learner = video()
    first, second = (learner.update(episodes[::2], index=index) for index in (0, 1))
    assert first["video/drift_before_nats"] == 0.0 < first["video/drift_nats"]
    assert second["video/drift_before_nats"] == first["video/drift_nats"] != second["video/drift_nats"]
    assert second["video/drift_nats"] == pytest.approx(learner.drift_from(tiny().export("world").digest), rel=1e-6)


def test_the_kl_weight_follows_the_drift_and_is_part_of_the_state(episodes: list[Episode]) -> None:
    learner = video(kl_weight=0.5, kl_target=1e-6)
    used = [learner.update(episodes[::2], index=index)["video/kl_weight"] for index in range(3)]
    assert used == [0.5, 1.0, 2.0] and learner.kl_weight == 4.0
    resumed = video(kl_weight=0.5, kl_target=1e-6)
    resumed.load_state(pickle.loads(pickle.dumps(learner.state())))
    assert resumed.update(episodes[::2], index=3)["video/kl_weight"] == 4.0
    constant = video(kl_weight=0.5)
    constant.update(episodes[::2], index=0)
    assert constant.kl_weight == 0.5


def test_the_kl_is_reported_per_layer(episodes: list[Episode]) -> None:
    metrics = video().update(episodes[::2], index=0)
    per_layer = [metrics[f"video/feature_kl_layer{i}_nats"] for i in range(2)]
    assert np.mean(per_layer) == pytest.approx(metrics["video/feature_kl_nats"], rel=1e-5)


# ------------------------------------------------------------------------------------------------ tasks


def test_tasks_have_equal_shares_of_an_update_however_many_successes_they_have() -> None:
    policy = tiny()
    pair = pair_of(policy)
    many = [act(policy, pair, i, success=True) for i in range(5)]
    rare = [act(policy, pair, 9, success=True, task_id=1)]

    def tasks(balance: bool) -> list[int]:
        learner = video(balance_tasks=balance, steps_per_update=5)
        windows = decisions_with_future([*many, *rare], policy.spec)
        batches = learner._batches([*many, *rare], windows, rng())
        seeds = {int(s): e.ticket.task_id for e in [*many, *rare] for s in e.world_seed}
        return [seeds[int(s)] for batch in batches for s in batch.world_seed]

    assert tasks(True).count(1) == 10
    assert 2 <= tasks(False).count(1) <= 4


# ------------------------------------------------------------------------------------------------ held out


def share_that_holds_out_some(starts: range) -> tuple[float, list[int]]:
    """A share at which at least one of the starts of task 0 is held out and at least one is not."""
    for share in (0.3, 0.5, 0.7):
        held = [start for start in starts if is_held_out(0, 0, start, share)]
        if 0 < len(held) < len(starts):
            return share, held
    raise AssertionError("no such share")


def test_held_out_starts_are_never_trained_on(episodes: list[Episode]) -> None:
    share, held = share_that_holds_out_some(range(3))
    trained = [e for e in episodes[::2] if e.ticket.init_state_id not in held]
    whole, part = video(held_out_share=share), video(held_out_share=share)
    metrics = whole.update(episodes[::2], index=0)
    assert metrics["video/episodes_count"] == len(trained)
    assert metrics["video/held_out_windows_count"] == 2 * len(held)
    without = part.update(trained, index=0)
    assert whole.export().digest == part.export().digest
    assert "video/held_out_error_before" in metrics and "video/held_out_error_before" not in without
    only_held = video(held_out_share=share).update([e for e in episodes[::2] if e not in trained], index=0)
    assert only_held["video/steps_count"] == 0


def test_the_held_out_error_is_that_of_one_step_imagination_beside_a_copy(episodes: list[Episode]) -> None:
    share, held = share_that_holds_out_some(range(3))
    learner = video(held_out_share=share, lr=0)
    metrics = learner.update(episodes[::2], index=0)
    policy, imagined, copied = tiny(), [], []
    for episode in (e for e in episodes[::2] if e.ticket.init_state_id in held):
        for t, seed in enumerate(episode.world_seed):
            now = episode.decision_obs[t]
            obs = policy.encode(torch.from_numpy(episode.frames[now][None, None]), [episode.instruction])
            for f, offset in enumerate((2, 4)):
                at = episode.obs_at(int(episode.obs_step[now]) + offset)
                if at is None:
                    continue
                picture = policy.imagine(obs, [int(seed)], 1)[0, f].numpy() * 2 - 1
                truth = episode.frames[at] / 127.5 - 1
                imagined.append(np.square(picture - truth).mean())
                copied.append(np.square(episode.frames[now] / 127.5 - truth - 1).mean())
    assert metrics["video/still_error"] == pytest.approx(np.mean(copied), rel=1e-4)
    # The imagination's pixels are clipped to [0, 1], the latents are not.
    assert metrics["video/held_out_error_before"] == pytest.approx(np.mean(imagined), rel=0.05)
    assert metrics["video/held_out_error_before"] == metrics["video/held_out_error_after"]


def test_training_changes_the_held_out_error_and_its_windows_stay(episodes: list[Episode]) -> None:
    share, _ = share_that_holds_out_some(range(3))
    learner = video(held_out_share=share)
    first, second = (learner.update(episodes[::2], index=index) for index in (0, 1))
    assert first["video/held_out_error_before"] != first["video/held_out_error_after"]
    assert second["video/held_out_error_before"] == first["video/held_out_error_after"]
    assert second["video/still_error"] == first["video/still_error"]


def test_held_out_windows_are_bounded() -> None:
    policy = tiny()
    pair = pair_of(policy)
    learner = video(held_out_share=0.999, held_out_windows=6)
    starts = [i for i in range(9) if is_held_out(0, 0, i, 0.999)]
    made = [act(policy, pair, i, decisions=5, success=True) for i in starts]
    learner.update(made, index=0)
    learner.update(made, index=1)
    assert len(learner.held_out) == 6  # four of the first start, two of the second


# ------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("kind", [Mixed, OutcomeConditioned])
def test_failures_get_their_share_of_every_batch_and_only_beside_successes(kind: Any, episodes: list[Episode]) -> None:
    learner = video(failures=kind(share=0.25))
    metrics = learner.update(episodes, index=0)
    assert metrics["video/failed_window_share"] == 0.25 and metrics["video/windows_count"] == 6 + 9
    assert learner.update(episodes[::2], index=1)["video/failed_window_share"] == 0
    before = learner.export().digest
    assert learner.update(episodes[1::2], index=2)["video/steps_count"] == 0 and learner.export().digest == before


def test_the_outcome_is_added_to_every_token_and_zero_is_success(episodes: list[Episode]) -> None:
    policy = tiny()
    batch = batch_of(episodes, [(0, 0), (1, 0)])
    obs, noise, one = policy.encode(batch.memory, batch.instruction), policy.world_noise([1, 2]), torch.ones(2)
    plain = policy.world_forward(obs, noise, one)
    for module in policy.world.transformer_blocks:  # an identity shows what goes in
        module.forward = lambda hidden_states, **rest: hidden_states
    outcome = torch.zeros(2, 32)
    outcome[1] = torch.arange(32.0)
    straight, marked = policy.world_forward(obs, noise, one), policy.world_forward(obs, noise, one, outcome)
    added = marked.features[0] - straight.features[0]
    assert torch.equal(added[0], torch.zeros_like(added[0]))
    assert torch.allclose(added[1], outcome[1].expand_as(added[1]), atol=1e-5)
    again = tiny().world_forward(obs, noise, one, torch.zeros(2, 32))
    assert torch.equal(again.velocity, plain.velocity)


def test_the_failure_vector_is_learned_from_failures_alone_and_never_published(episodes: list[Episode]) -> None:
    learner = video(failures=OutcomeConditioned())
    layout = learner.export().layout
    assert learner.update(episodes[::2], index=0)["video/failure_embed_norm"] == 0
    assert learner.update(episodes, index=1)["video/failure_embed_norm"] > 0
    kept = learner.failure_embed.detach().clone()
    learner.update(episodes[::2], index=2)
    assert torch.equal(learner.failure_embed.detach(), kept), "no failure, no step: nor one from momentum"
    assert learner.export().layout == layout == tiny().export("world").layout
    mixed = video(failures=Mixed())
    mixed.update(episodes, index=0)
    assert mixed.failure_embed.norm() == 0


def test_the_anchor_does_not_hold_what_only_failures_see(episodes: list[Episode]) -> None:
    # Rows 0 and 1 are anchored whatever is drawn (share 1); row 1 failed.
    batch = batch_of(episodes, [(0, 0), (1, 0)])
    gradient = {}
    for kind in (OutcomeConditioned(), Mixed()):
        learner = video(failures=kind, sigma_one_share=1.0, batch_size=2)
        learner.probe(episodes)
        with torch.no_grad():
            learner.failure_embed.add_(0.5)
            # Fresh it is 0, and no gradient passes it.
            learner.policy.world.proj_out.weight.normal_(generator=torch.Generator().manual_seed(0))
        terms = learner.loss_terms(batch, rng())
        gradient[kind.kind] = torch.autograd.grad(
            terms["feature_kl_nats"], learner.failure_embed, allow_unused=True, retain_graph=True
        )[0]
        if kind.kind == "outcome_conditioned":
            assert gradient[kind.kind] is not None and not gradient[kind.kind].any()
            flow = torch.autograd.grad(terms["flow_loss"], learner.failure_embed)[0]
            assert flow.norm() > 0
    assert gradient["mixed"] is None


# ------------------------------------------------------------------------------------------------ pretraining data


def demonstration_windows() -> Windows:
    rng, steps = np.random.default_rng(5), 8
    places = rng.uniform(0.1, 0.9, (steps + 1, 2))
    demo = Demonstration(
        env="reach", simulator="none", task_id=0, init_state_id=0, seed=0, instruction="reach the circle", success=True,
        frames=np.stack([picture(p) for p in places[::2]]), obs_step=np.arange(0, steps + 1, 2, dtype=np.int32),
        state=np.float32(places), action=np.zeros((steps, 2), np.float32), label=np.zeros((steps, 2), np.float32),
    )  # fmt: skip
    return make_windows([demo], WAMConfig.debug())


def test_demonstrations_get_their_share_of_every_batch(episodes: list[Episode]) -> None:
    windows = demonstration_windows()
    replay = PretrainingReplayConfig(path="demos", share=0.5)
    learner, plain = video(windows=windows, pretraining=replay), video()
    assert learner.update(episodes[::2], index=0)["video/pretraining_window_share"] == 0.5
    assert plain.update(episodes[::2], index=0)["video/pretraining_window_share"] == 0
    assert learner.export().digest != plain.export().digest
    with pytest.raises(ValueError, match="pretraining.path = 'demos': no windows"):
        video(pretraining=replay)
    with pytest.raises(ValueError, match="pretraining.path = '': 4 windows"):
        video(windows=windows)


def test_a_window_of_a_demonstration_is_a_row_like_an_episodes(episodes: list[Episode]) -> None:
    windows = demonstration_windows()
    rows = of_windows(windows, np.array([1, 3]))
    assert torch.equal(rows.memory[0, 0], windows.frames[1])
    assert torch.equal(rows.future[0], windows.frames[[2, 3]])
    assert rows.seen.tolist() == [[True, True], [True, False]] and rows.seen.dtype == torch.bool
    both = join([batch_of(episodes, [(0, 0)]), rows])
    assert len(both) == 3 and both.instruction == ("reach the square", "reach the circle", "reach the circle")
    assert both.demonstrated.tolist() == [False, True, True] and both.failed.tolist() == [False] * 3


# ------------------------------------------------------------------------------------------------ everything at once


def test_bf16_losses_are_close_and_weights_stay_fp32(episodes: list[Episode]) -> None:
    terms = []
    for precision in ("fp32", "bf16"):
        learner = video(precision=precision)
        learner.probe(episodes)
        with torch.no_grad():
            for parameter in learner.policy.world.parameters():
                parameter.add_(0.02)
        terms.append(learner.loss_terms(batch_of(episodes, [(0, 0), (2, 1), (4, 0)]), rng()))
    for name, exact in terms[0].items():
        rough = terms[1][name]
        assert rough.dtype == torch.float32 and rough.item() != exact.item()
        assert rough.item() == pytest.approx(exact.item(), rel=0.05), name
    learner.update(episodes[::2], index=0)
    assert {p.dtype for p in learner.policy.world.parameters()} == {torch.float32}


def test_with_every_option_an_update_is_a_function_of_state_episodes_and_index(episodes: list[Episode]) -> None:
    share, _ = share_that_holds_out_some(range(3))
    windows = demonstration_windows()
    options: dict[str, Any] = {
        "failures": OutcomeConditioned(), "held_out_share": share, "kl_target": 1e-3, "windows": windows,
        "pretraining": PretrainingReplayConfig(path="demos", share=0.25),
    }  # fmt: skip
    learner, resumed = video(**options), video(**options)
    learner.update(episodes, index=0)
    resumed.load_state(pickle.loads(pickle.dumps(learner.state())))
    assert equal(resumed.state(), learner.state())
    assert learner.update(episodes, index=1) == resumed.update(episodes, index=1)
    assert equal(resumed.state(), learner.state())
    assert learner.failure_embed.norm() > 0 and len(learner.held_out) > 0 and learner.kl_weight != 0.1
