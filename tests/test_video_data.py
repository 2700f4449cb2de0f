"""What the video learner is given to learn from: tasks in equal shares, held-out starts, failures, demonstrations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from learners.batching import decisions_with_future
from learners.video_batch import join, of_windows
from learners.video_config import Mixed, OutcomeConditioned, PretrainingReplayConfig
from learners.video_sampling import is_held_out
from tests.toy_learning import (
    act,
    batch_of,
    demonstration_windows,
    pair_of,
    rng,
    share_that_holds_out_some,
    tiny,
    toy_episodes,
    video,
)  # fmt: skip
from wamrl_ray.policy import world_model
from wamrl_ray.types import Episode


@pytest.fixture(scope="module")
def episodes() -> list[Episode]:
    return toy_episodes()


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
    assert second["video/held_out_windows_count"] == first["video/held_out_windows_count"]


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


def test_the_outcome_is_added_to_every_token_and_zero_is_success(
    episodes: list[Episode], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny()
    batch = batch_of(episodes, [(0, 0), (1, 0)])
    obs, noise, one = policy.encode(batch.memory, batch.instruction), policy.world_noise([1, 2]), torch.ones(2)
    plain = policy.world_forward(obs, noise, one)
    monkeypatch.setattr(world_model, "run_block", lambda block, hidden, conditions: hidden)  # shows what goes in
    outcome = torch.zeros(2, 32)
    outcome[1] = torch.arange(32.0)
    straight, marked = policy.world_forward(obs, noise, one), policy.world_forward(obs, noise, one, outcome)
    added = marked.features[0] - straight.features[0]
    assert torch.equal(added[0], torch.zeros_like(added[0]))
    assert torch.allclose(added[1], outcome[1].expand_as(added[1]), atol=1e-5)
    monkeypatch.undo()
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
