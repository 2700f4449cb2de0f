"""The switches that made others' runs reproducible, each with a case in which it makes the difference."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from learners.actor_flow_sde import ActorFlowSDELearner
from learners.advantages import Estimate, GroupConfig
from learners.gae import GAEConfig
from learners.labels import LabelledBatch
from learners.ppo import PPOConfig
from learners.tally import Tally
from learners.transitions import log_probs
from tests.toy_learning import actor, gradients, labelled, moved, tiny, toy_episodes
from wamrl_ray.policy.flow_sde import SamplerConfig, transition
from wamrl_ray.rewards.reconstruction import RewardConfig
from wamrl_ray.types import Episode, Metrics

ALL = SamplerConfig(stochastic="all")
TWO = SamplerConfig(stochastic="all", num_steps=3)
"""Two random transitions per decision: the last of three is excluded."""


@pytest.fixture(scope="module")
def episodes() -> list[Episode]:
    return toy_episodes()


def only_success(**config: Any) -> ActorFlowSDELearner:
    return actor(reward=RewardConfig(weight=0.0), **config)


def flat_estimate(count: int, advantage: float) -> Estimate:
    zeros = torch.zeros(count)
    return Estimate(advantage=zeros + advantage, keep=torch.ones(count).bool(), target=zeros, value=zeros)


# ------------------------------------------------------------------------------------------------ behaviour log-probs


def test_stored_log_probs_move_the_first_ratio_off_one_and_recomputed_ones_do_not(episodes: list[Episode]) -> None:
    off = [replace(e, behaviour_logprob=e.behaviour_logprob + np.float32(0.125)) for e in episodes]
    for proximal in ("behaviour", "update_start"):
        common = {"lr": 0.0, "mask_unexecuted": False, "objective": PPOConfig(proximal=proximal, clip_low=0.1)}
        stored = actor(**common, behaviour_logprob="stored").update(off, index=0)
        exact = actor(**common).update(off, index=0)
        assert stored["actor/ratio_mean"] == pytest.approx(np.exp(-0.125), abs=1e-3)
        assert stored["actor/clip_fraction"] > 0.2
        assert exact["actor/ratio_mean"] == 1.0 and exact["actor/clip_fraction"] == 0.0
        assert stored["actor/kl_to_start_nats"] == exact["actor/kl_to_start_nats"] == 0.0
        assert exact["actor/behaviour_logprob_gap_nats"] == pytest.approx(0.125, abs=1e-3)


def test_stale_data_is_weighted_by_the_truncated_ratio_of_start_to_behaviour(episodes: list[Episode]) -> None:
    learner = only_success(lr=0.0, mask_unexecuted=False)
    learner.rebase(moved(learner.policy, "world"))
    batches = labelled(learner, episodes)
    ratio = torch.cat([(b.start_logprob - b.behaviour_logprob).exp() for b in batches])
    cap = float(ratio.median().clamp(min=1.0))
    assert ratio.max() > 1.05 * cap
    taken, means = {}, {}
    for cut in (0.0, cap, 100.0):
        learner = only_success(lr=0.0, mask_unexecuted=False, epochs=1, batch_size=99, advantage=GroupConfig(),
                               objective=PPOConfig(importance_cap=cut))  # fmt: skip
        learner.rebase(moved(learner.policy, "world"))
        taken[cut] = gradients(learner, episodes)[0]
        means[cut] = learner.update(episodes, index=0)["actor/importance_weight_mean"]
    assert means[0.0] == 1.0
    assert means[cap] == pytest.approx(float(ratio.clamp(max=cap).mean()), rel=1e-4)
    assert means[100.0] == pytest.approx(float(ratio.mean()), rel=1e-4)
    for a, b in ((0.0, cap), (cap, 100.0)):
        assert float((taken[a] - taken[b]).norm()) > 1e-2 * float(taken[a].norm())


# ------------------------------------------------------------------------------------------------ statistics


def advantages(normalise: str, batch_size: int, episodes: list[Episode]) -> tuple[dict[tuple[int, int], float], Any]:
    """Advantage by (episode, decision), and the advantages of each gradient batch."""
    learner = actor(advantage=GAEConfig(normalise=normalise), batch_size=batch_size)  # type: ignore[arg-type]
    batches = labelled(learner, episodes)
    flat = learner.estimator.estimate(learner.policy, episodes, batches, Tally()).advantage
    where = [(int(e), int(t)) for b in batches for e, t in zip(b.episode, b.decision, strict=True)]
    number = torch.cat([torch.full_like(b.episode, b.batch) for b in batches])
    return dict(zip(where, flat.tolist(), strict=True)), [flat[number == i] for i in range(int(number.max()) + 1)]


def test_global_statistics_do_not_depend_on_the_batch_size_and_batch_statistics_do(episodes: list[Episode]) -> None:
    whole, _ = advantages("global", 99, episodes)
    small, _ = advantages("global", 4, episodes)
    assert whole == pytest.approx(small, abs=1e-4) and len(whole) == 15
    values = torch.tensor(list(whole.values()))
    assert float(values.mean().abs()) < 1e-5 and float(values.std(unbiased=False)) == pytest.approx(1.0, abs=1e-3)
    parts, batches = advantages("batch", 4, episodes)
    assert all(float(b.mean().abs()) < 1e-5 and abs(float(b.std(unbiased=False)) - 1) < 1e-2 for b in batches)
    assert len(batches) == 4 and max(abs(parts[key] - whole[key]) for key in whole) > 0.1
    raw, _ = advantages("none", 4, episodes)
    mean, std = np.mean(list(raw.values())), np.std(list(raw.values()))
    assert {key: (value - mean) / std for key, value in raw.items()} == pytest.approx(whole, abs=1e-3)


# ------------------------------------------------------------------------------------------------ masks


def test_what_was_planned_beyond_success_counts_only_where_it_is_asked_to(episodes: list[Episode]) -> None:
    """The last chunk of episode 0 ended after 3 of 4 steps: another noise in its fourth row."""
    first = episodes[0]
    chain, k = first.chain.copy(), int(first.stochastic_step[-1])
    assert first.executed.tolist() == [4, 3]
    chain[-1, k + 1, 3, :2] += 0.5
    for mask in (True, False):
        taken = []
        for episode in (first, replace(first, chain=chain)):
            learner = only_success(lr=0.0, epochs=1, mask_unexecuted=mask)
            taken.append(gradients(learner, [episode, episodes[1]])[0])
        assert torch.equal(*taken) == mask


# ------------------------------------------------------------------------------------------------ success


def test_a_success_that_is_lost_again_is_paid_once_or_taken_back(episodes: list[Episode]) -> None:
    lost = replace(
        episodes[1], env_reward=np.float32([0, 1, 0]), success=True, success_step=7, terminated=False, truncated=True
    )
    expected = {"best_so_far": [0.0, 3.0, 0.0], "difference": [0.0, 3.0, -3.0]}
    for form, per_decision in expected.items():
        reward = RewardConfig(weight=0.0, success_weight=3.0, success_form=form)  # type: ignore[arg-type]
        learner = actor(reward=reward, batch_size=2)
        paid = {int(t): float(r) for b in labelled(learner, [lost]) for t, r in zip(b.decision, b.reward, strict=True)}
        assert [paid[t] for t in range(3)] == per_decision
        assert learner.update([lost], index=0)["reward/decision_mean"] == pytest.approx(sum(per_decision) / 3)


# ------------------------------------------------------------------------------------------------ critic warm-up


def gated(**config: Any) -> ActorFlowSDELearner:
    settings: dict[str, Any] = {"critic_epochs": 60, "warmup_explained_variance": 0.3, "gamma": 0.0} | config
    return only_success(advantage=GAEConfig(**settings), epochs=1, batch_size=99)


def trained(learner: ActorFlowSDELearner, episodes: list[Episode], index: int) -> tuple[bool, Metrics]:
    before = learner.export().digest
    metrics = learner.update(episodes, index=index)
    return learner.export().digest != before, metrics


def resumed(learner: ActorFlowSDELearner, fresh: ActorFlowSDELearner) -> ActorFlowSDELearner:
    fresh.load_state(pickle.loads(pickle.dumps(learner.state())))
    return fresh


def test_the_expert_waits_until_the_critic_explains_the_returns_and_then_never_again(episodes: list[Episode]) -> None:
    learner = gated()
    acted, metrics = trained(learner, episodes, 0)
    assert not acted and metrics["actor/warming_up"] == 1.0 and metrics["actor/explained_variance"] < 0.3
    assert learner.trained_against_world and metrics["actor/value_loss"] > 0
    acted, metrics = trained(learner, episodes, 1)
    assert acted and metrics["actor/warming_up"] == 0.0 and metrics["actor/explained_variance"] >= 0.3
    other_way = [
        replace(e, success=not e.success, success_step=-1 if e.success else 3, terminated=not e.success)
        for e in episodes
    ]
    for again in (resumed(learner, gated()), learner):
        acted, metrics = trained(again, other_way, 2)
        assert acted and metrics["actor/explained_variance"] < 0.3


def test_the_expert_waits_no_longer_than_allowed(episodes: list[Episode]) -> None:
    settings = {"critic_lr": 0.0, "warmup_max_updates": 2}
    learner = gated(**settings)
    assert not trained(learner, episodes, 0)[0]
    again = resumed(learner, gated(**settings))  # the wait continues, it does not begin anew
    for one in (learner, again):
        assert [trained(one, episodes, i)[0] for i in (1, 2)] == [False, True]
    fixed = gated(critic_lr=0.0, warmup_max_updates=0, warmup_updates=1)
    assert [trained(fixed, episodes, i)[0] for i in (0, 1)] == [False, True]


# ------------------------------------------------------------------------------------------------ clip and units


def test_a_step_dependent_clip_narrows_the_steps_it_should() -> None:
    made = toy_episodes(tiny(sampler=ALL))
    fraction = {}
    for name in ("constant", "exponential"):
        learner = actor(tiny(sampler=ALL), RewardConfig(weight=0.0), ALL, epochs=1, batch_size=4, target_kl=0.0,
                        objective=PPOConfig(clip_schedule=name, clip_first=1e-3))  # fmt: skip
        metrics = learner.update(made, index=0)
        fraction[name] = [metrics[f"actor/clip_fraction_step{k}"] for k in range(3)]
    assert fraction["exponential"][0] > fraction["constant"][0] + 0.2
    assert fraction["exponential"][0] > fraction["exponential"][2] - 0.1
    wide = sum(fraction["exponential"][k] > fraction["constant"][k] for k in (0, 1))
    assert wide == 2


def test_kl_ratio_and_clip_fraction_are_per_decision_by_hand() -> None:
    """Two transitions per decision whose log-ratios are 0.3 and -0.1: one decision of ratio e^0.2, not two of each."""
    policy = tiny(sampler=TWO)
    learner = actor(policy, sampler=TWO, lr=0.0, epochs=1, batch_size=99, micro_batch=4)
    batches = labelled(learner, toy_episodes(tiny(sampler=TWO))[:2])
    shift = torch.tensor([0.3, -0.1])
    batches = [replace(b, start_logprob=b.start_logprob - shift, behaviour_logprob=b.behaviour_logprob - shift)
               for b in batches]  # fmt: skip
    tally = Tally()
    learner.policy_update.run(batches, flat_estimate(5, 1.0), np.random.default_rng(0), tally)
    means = tally.means()
    assert means["actor/ratio_mean"] == pytest.approx(np.exp(0.2), rel=1e-4)
    assert means["actor/approx_kl_nats"] == pytest.approx(np.exp(0.2) - 1 - 0.2, rel=1e-3)
    assert means["actor/clip_fraction"] == 1.0  # every decision has a clipped transition
    assert (means["actor/clip_fraction_step0"], means["actor/clip_fraction_step1"]) == (1.0, 0.0)
    assert means["actor/policy_loss"] == pytest.approx(-(1.2 + np.exp(-0.1)) / 2, rel=1e-4)


# ------------------------------------------------------------------------------------------------ approx KL


def with_fresh_noise(batch: LabelledBatch, number: int, sampler: SamplerConfig, seed: int) -> LabelledBatch:
    """The same decisions, had their random transitions come out differently."""
    moves, generator = batch.transitions, torch.Generator().manual_seed(seed)
    mean, std = transition(moves.x, batch.start, moves.step, sampler)
    x_next = mean + std * torch.randn(mean.shape, generator=generator)
    moves = replace(moves, x_next=torch.where(moves.mask > 0, x_next, moves.x_next))
    log_prob = log_probs(moves, batch.start, sampler)
    return replace(batch, batch=number, transitions=moves, start_logprob=log_prob, behaviour_logprob=log_prob)


@pytest.mark.parametrize("sampler", [SamplerConfig(), SamplerConfig(noise="flow_noise", stochastic="all")])
def test_the_estimated_kl_agrees_with_the_exact_one_within_five_percent(sampler: SamplerConfig) -> None:
    """Eight steps of 300 decisions, no decision seen twice, so that the samples are still the old policy's."""
    policy = tiny(sampler=sampler)
    learner = actor(policy, sampler=sampler, lr=2e-4, epochs=1, batch_size=99, micro_batch=99, target_kl=0.0)
    (batch,) = labelled(learner, toy_episodes(tiny(sampler=sampler)))
    batches = [with_fresh_noise(batch, i // 20, sampler, seed=i) for i in range(160)]
    estimate = flat_estimate(160 * len(batch), 0.0)
    estimate = replace(estimate, advantage=torch.randn(len(estimate.advantage), generator=torch.manual_seed(0)))
    tally = Tally()
    learner.policy_update.run(batches, estimate, np.random.default_rng(0), tally)
    means = tally.means()
    assert 1e-4 < means["actor/kl_to_start_nats"] < 0.1
    assert means["actor/approx_kl_nats"] == pytest.approx(means["actor/kl_to_start_nats"], rel=0.05)


# ------------------------------------------------------------------------------------------------ another world


def preference(learner: ActorFlowSDELearner, episodes: list[Episode]) -> float:
    """How much more probable the learner finds what led to success than the rest, in its own world's features, nats."""
    batches = labelled(learner, episodes)
    log_prob = torch.cat([b.start_logprob.sum(dim=1) for b in batches])
    won = torch.tensor([episodes[int(e)].success for b in batches for e in b.episode])
    return float(log_prob[won].mean() - log_prob[~won].mean())


def test_the_actor_goes_on_learning_in_a_new_worlds_features_from_what_was_done_in_the_old_ones(
    episodes: list[Episode],
) -> None:
    learner = only_success(lr=3e-4, epochs=1, target_kl=0.0, advantage=GroupConfig(), mask_unexecuted=False)
    old, new = learner.world.digest, moved(learner.policy, "world")
    learner.update(episodes, index=0)
    assert learner.trained_against_world == old
    learner.rebase(new)
    assert learner.trained_against_world == old, "until it has taken a step there"
    liked = [preference(learner, episodes)]
    for index in (1, 2, 3):
        metrics = learner.update(episodes, index=index)
        assert learner.trained_against_world == new.digest
        assert metrics["actor/behaviour_logprob_gap_nats"] < 2e-3 and metrics["actor/kl_to_behaviour_nats"] > 0
        liked.append(preference(learner, episodes))
    assert all(later > earlier + 0.02 for earlier, later in itertools.pairwise(liked)), liked
