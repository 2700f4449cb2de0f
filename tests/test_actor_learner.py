"""The actor learner on a network of toy size, fed with episodes that the same network acted."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from learners.actor_flow_sde import ActorFlowSDELearner
from learners.advantages import GroupConfig
from learners.batching import all_decisions, gather
from learners.critic import Critic
from learners.gae import GAEConfig, GAEEstimator
from learners.ppo import PPOConfig
from learners.transitions import log_probs, predict, transitions
from tests.toy_learning import SAMPLER, act, actor, equal, moved, pair_of, tiny, toy_episodes
from wamrl_ray.policy.flow_sde import SamplerConfig
from wamrl_ray.rewards.reconstruction import RewardConfig
from wamrl_ray.types import Episode


def critic_of(learner: ActorFlowSDELearner) -> Critic:
    assert isinstance(learner.estimator, GAEEstimator)
    return learner.estimator.critic


@pytest.fixture(scope="module")
def episodes() -> list[Episode]:
    return toy_episodes()


@pytest.mark.parametrize("advantage", [GAEConfig(), GroupConfig()])
@pytest.mark.parametrize("stochastic", ["one", "all"])
def test_with_lr_zero_the_ratio_is_exactly_one_and_nothing_clips(
    advantage: GAEConfig | GroupConfig, stochastic: str
) -> None:
    sampler = SamplerConfig(stochastic=stochastic)  # type: ignore[arg-type]
    policy = tiny(sampler=sampler)
    made = [act(policy, pair_of(policy), i, success=i % 2 == 0, init_state_id=0) for i in range(4)]
    narrow = PPOConfig(clip_low=1e-6, clip_high=1e-6)
    learner = actor(
        policy, sampler=sampler, lr=0, advantage=advantage, epochs=2, batch_size=5, micro_batch=5, objective=narrow
    )
    before = learner.export().digest
    metrics = learner.update(made, index=0)
    assert metrics["actor/ratio_mean"] == 1.0 and metrics["actor/ratio_deviation_mean"] == 0.0
    assert all(value == 0.0 for name, value in metrics.items() if "clip_fraction" in name or "kl_" in name)
    assert metrics["actor/behaviour_logprob_gap_nats"] < 1e-3
    assert metrics["actor/grad_norm"] > 0 and learner.export().digest == before


def test_the_expert_and_critic_learn_and_the_world_does_not(episodes: list[Episode]) -> None:
    learner = actor(target_kl=0.0)
    world, expert = learner.policy.export("world").digest, learner.export().digest
    critic = copy.deepcopy(critic_of(learner).state_dict())
    metrics = learner.update(episodes, index=0)
    assert learner.policy.export("world").digest == world and learner.export().digest != expert
    assert all(p.grad is None for p in learner.policy.world.parameters())
    assert any(not torch.equal(critic[name], tensor) for name, tensor in critic_of(learner).state_dict().items())
    assert metrics["actor/decisions_count"] == 15 and metrics["reward/success_share"] == 0.5
    assert metrics["actor/kl_to_behaviour_nats"] > 0 and metrics["actor/clip_fraction"] >= 0
    assert {f"actor/kl_to_start_step{k}_nats" for k in range(3)} <= metrics.keys()


def test_the_critic_takes_gradient_and_gives_none_to_the_features() -> None:
    learner = actor()
    pooled = torch.randn(4, learner.policy.pooled_dim, requires_grad=True)
    with torch.no_grad():
        critic_of(learner).layers[-1].weight.fill_(0.1)
    critic_of(learner)(pooled, torch.zeros(4, 2)).sum().backward()
    assert pooled.grad is None and all(p.grad is not None for p in critic_of(learner).parameters())


def test_the_critic_fixes_its_input_scale_once() -> None:
    critic = critic_of(actor())
    pooled, state = 5.0 + 0.01 * torch.randn(50, critic.mean.numel() - 2), torch.randn(50, 2)
    critic.fit_scale(pooled, state)
    critic.fit_scale(9.0 * pooled, state)
    inputs = (torch.cat([pooled, state], dim=1) - critic.mean) / critic.std
    torch.testing.assert_close(inputs.mean(dim=0), torch.zeros(inputs.shape[1]), atol=1e-3, rtol=0)
    torch.testing.assert_close(inputs.std(dim=0, unbiased=False), torch.ones(inputs.shape[1]), atol=1e-3, rtol=0)


def test_the_critic_comes_to_explain_the_returns(episodes: list[Episode]) -> None:
    learner = actor(lr=0, advantage=GAEConfig(critic_epochs=80))
    first = learner.update(episodes, index=0)
    assert first["actor/value_mean"] == 0.0
    last = learner.update(episodes, index=1)
    assert last["actor/explained_variance"] > first["actor/explained_variance"] + 0.3


def test_an_action_that_led_to_success_becomes_more_probable(episodes: list[Episode]) -> None:
    policy = tiny()
    made = [act(policy, pair_of(policy), i, success=i == 0, init_state_id=0) for i in range(4)]
    learner = actor(policy, RewardConfig(weight=0.0), advantage=GroupConfig(), epochs=4, target_kl=0.0, lr=3e-4)
    learner.update(made, index=0)

    def log_prob(episode: Episode) -> float:
        batch = gather([episode], all_decisions([episode]), policy.spec)
        mask = policy.executed_mask().expand(len(batch), -1, -1)
        with torch.no_grad():
            context = policy.world_context(policy.encode(batch.memory, batch.instruction), batch.world_seed)
            moves = transitions(batch.chain, batch.stochastic_step, mask, SAMPLER)
            return float(log_probs(moves, predict(policy, context, moves, batch.state, SAMPLER), SAMPLER).sum())

    change = [log_prob(episode) - float(episode.behaviour_logprob.sum()) for episode in made]
    assert change[0] > 0 and change[0] > max(change[1:])


def test_the_kl_to_the_base_changes_the_result_and_holds_the_expert_back(episodes: list[Episode]) -> None:
    kl = {}
    for weight in (0.0, 10.0):
        learner = actor(kl_to_base=weight, epochs=4, target_kl=0.0)
        learner.update(episodes, index=0)
        kl[weight] = learner.update(episodes, index=1)["actor/kl_to_base_nats"]
    assert kl[10.0] < 0.5 * kl[0.0]


def test_the_anchor_stays_at_the_base_from_update_to_update(episodes: list[Episode]) -> None:
    learner = actor(target_kl=0.0)
    learner.update(episodes, index=0)
    learner.optimizer.optimizer.param_groups[0]["lr"] = 0.0
    assert learner.update(episodes, index=1)["actor/kl_to_base_nats"] > 0


def test_the_target_kl_stops_an_update_early(episodes: list[Episode]) -> None:
    free, held = actor(epochs=3, target_kl=0.0), actor(epochs=3, target_kl=1e-3)
    assert free.update(episodes, index=0)["actor/stopped_early"] == 0.0
    metrics = held.update(episodes, index=0)
    assert metrics["actor/stopped_early"] == 1.0 and metrics["actor/kl_to_start_nats"] <= 1e-3


def test_critic_warm_up_leaves_the_expert_alone(episodes: list[Episode]) -> None:
    learner = actor(advantage=GAEConfig(warmup_updates=1))
    before = learner.export().digest
    learner.update(episodes, index=0)
    assert learner.export().digest == before
    learner.update(episodes, index=1)
    assert learner.export().digest != before


def test_groups_that_all_succeed_or_all_fail_can_be_filtered(episodes: list[Episode]) -> None:
    learner = actor(advantage=GroupConfig(filter_low=0.6, filter_high=0.9))
    before = learner.export().digest
    metrics = learner.update(episodes, index=0)
    assert metrics["actor/filtered_group_share"] == 1.0 and learner.export().digest == before
    assert actor(advantage=GroupConfig()).update(episodes, index=0)["actor/filtered_group_share"] == 0.0


def test_rewards_are_labelled_with_success_and_what_was_imagined(episodes: list[Episode]) -> None:
    learner = actor(reward=RewardConfig(weight=2.0, success_weight=3.0, imagine_steps=1))
    metrics = learner.update(episodes, index=0)
    expected = 2.0 * metrics["reward/reconstruction_mean"] + 3.0 * 3 / 15
    assert metrics["reward/decision_mean"] == pytest.approx(expected, rel=1e-5)
    assert metrics["reward/scored_share"] == 1.0
    clip = learner.clip()
    assert clip is not None and clip["imagined"].shape == (2, 2, 1, 32, 32, 3) == clip["executed"].shape
    assert clip["imagined"].dtype == np.uint8 and clip["reached"].tolist() == [[True, True], [True, False]]
    spec = learner.policy.spec
    obs = learner.policy.encode(*(lambda b: (b.memory, b.instruction))(gather(episodes, [(0, 1)], spec)))
    imagined = learner.policy.imagine(obs, episodes[0].world_seed[1:], 1)[0]
    assert np.abs(imagined.numpy() * 255 - clip["imagined"][1]).max() <= 0.6
    assert np.array_equal(clip["executed"][0, 1], episodes[0].frames[episodes[0].decision_obs[1]])


def test_evaluation_unknown_and_broken_episodes_are_not_trained_on(episodes: list[Episode]) -> None:
    learner, policy = actor(), tiny()
    with pytest.raises(ValueError, match="purpose = 'eval'"):
        learner.update([act(policy, pair_of(policy), 9, purpose="eval")], index=0)
    ode = replace(episodes[0], stochastic_step=np.full_like(episodes[0].stochastic_step, -1))
    with pytest.raises(ValueError, match="0 random transitions where"):
        learner.update([ode], index=0)
    with pytest.raises(ValueError, match="not remembered"):
        learner.update([replace(episodes[0], pair=replace(episodes[0].pair, seq=5))], index=0)
    before = learner.export().digest
    metrics = learner.update([replace(episodes[0], error="NaN action")], index=0)
    assert metrics["actor/dropped_error_count"] == 1 and learner.export().digest == before
    with pytest.raises(ValueError, match="pass the weights"):
        learner.remember(episodes[0].pair, policy.export("world"), tiny(seed=1).export("actor"))


def test_a_refused_batch_leaves_the_learners_own_weights_in_place(episodes: list[Episode]) -> None:
    learner = actor()
    learner.update(episodes, index=0)
    trained = learner.export().digest
    with pytest.raises(ValueError, match="0 random transitions where"):
        learner.update([replace(episodes[0], stochastic_step=np.int32([0, -1]))], index=1)
    assert learner.export().digest == trained


def test_after_a_rebase_behaviour_is_still_scored_at_the_behaviour_weights(episodes: list[Episode]) -> None:
    learner = actor(lr=0)
    base_world = learner.trained_against_world
    new = moved(learner.policy, "world")
    learner.rebase(new)
    assert learner.trained_against_world == base_world
    metrics = learner.update(episodes, index=0)
    assert metrics["actor/behaviour_logprob_gap_nats"] < 1e-3  # recomputed in the world that acted
    assert metrics["actor/kl_to_behaviour_nats"] > 0 and metrics["actor/importance_weight_mean"] != 1.0
    assert metrics["actor/ratio_deviation_mean"] == metrics["actor/kl_to_start_nats"] == 0.0
    assert learner.trained_against_world == new.digest == learner.policy.export("world").digest


def test_the_oldest_pair_is_forgotten(episodes: list[Episode]) -> None:
    learner, policy = actor(remember_pairs=2), tiny()
    for seq in (1, 2):
        learner.remember(pair_of(policy, seq), policy.export("world"), policy.export("actor"))
    with pytest.raises(ValueError, match="not remembered"):
        learner.update(episodes, index=0)


def test_an_actor_update_is_a_function_of_state_episodes_and_index(episodes: list[Episode]) -> None:
    one, other, shifted = actor(), actor(), actor()
    assert one.update(episodes, index=3) == other.update(episodes, index=3)
    shifted.update(episodes, index=4)
    assert one.export().digest == other.export().digest != shifted.export().digest


def test_the_actor_state_round_trips_bit_for_bit(episodes: list[Episode]) -> None:
    learner, other = actor(), tiny()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.0 if not parameter.requires_grad else 1.1)
    resumed = actor(other)
    learner.update(episodes, index=0)
    learner.rebase(moved(learner.policy, "world"))
    resumed.load_state(pickle.loads(pickle.dumps(learner.state())))
    assert equal(resumed.state(), learner.state())
    assert resumed.update(episodes, index=1) == learner.update(episodes, index=1)
    assert resumed.export().digest == learner.export().digest
    assert equal(resumed.state(), learner.state())


def test_an_actor_that_only_sees_the_ode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sampler\.eta = 0"):
        actor(sampler=SamplerConfig(eta=0.0))
