"""Both learners on a network of toy size, fed with episodes that the same network acted."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from learners.actor_flow_sde import ActorFlowSDEConfig, ActorFlowSDELearner
from learners.batching import all_decisions, final_memory, gather, success_decision, to_time_major
from learners.optim import GuardedAdamW
from learners.video_sft import VideoSFTConfig, VideoSFTLearner
from wamrl_ray.policy.flow_sde import SamplerConfig
from wamrl_ray.policy.wam import WAM, WAMConfig
from wamrl_ray.policy.weights import to_snapshot
from wamrl_ray.rewards.reconstruction import RewardConfig
from wamrl_ray.types import Episode, Pair, Snapshot, Ticket

SAMPLER = SamplerConfig()


def tiny(seed: int = 0, sampler: SamplerConfig = SAMPLER) -> WAM:
    return WAM(WAMConfig.debug(), sampler, seed=seed)


def pair_of(policy: WAM, seq: int = 0) -> Pair:
    world, actor = policy.export("world").digest, policy.export("actor").digest
    return Pair(
        epoch=0, seq=seq, world=world, actor=actor, trained_against_world=world, interface=policy.interface_digest
    )


def picture(position: np.ndarray) -> np.ndarray:
    """A bright square at a place in [0, 1]^2."""
    image = np.full((1, 32, 32, 3), 40, np.uint8)
    row, column = (np.clip(position, 0, 1) * 24).astype(int)
    image[0, row : row + 8, column : column + 8] = (250, 120, 20)
    return image


def act(
    policy: WAM, pair: Pair, ticket_id: int, *, decisions: int = 3, success: bool = False, **ticket: Any
) -> Episode:
    """An episode of a square that the actions push; E = 4, offsets 2 and 4; success comes at step 3 of the last chunk."""
    rng = np.random.default_rng(ticket_id)
    position = rng.uniform(0.2, 0.8, 2)
    frames, states, steps = [picture(position)], [position], [0]
    made, at = [], []
    executed = [4] * decisions
    executed[-1] = 3 if success else 4
    stochastic = ticket.get("purpose", "train") == "train"
    for t in range(decisions):
        at.append(len(frames) - 1)
        decision = policy.decide(
            frames[-1][None], np.float32(states[-1]), "reach the square", action_seed=100 * ticket_id + t,
            world_seed=7 * ticket_id + t, stochastic=stochastic,
        )  # fmt: skip
        made.append(decision)
        for step, action in enumerate(decision.actions[: executed[t]], start=1):
            position = np.clip(position + 0.05 * action, 0, 1)
            if step in (2, 4):
                frames.append(picture(position))
                states.append(position)
                steps.append(4 * t + step)
    chain = np.stack([d.chain for d in made])
    fields = {"env": "reach", "task_id": 0, "init_state_id": ticket_id, "run_seed": 0, "purpose": "train"} | ticket
    return Episode(
        ticket=Ticket(ticket_id=ticket_id, deadline_s=9.0, **fields), instruction="reach the square", pair=pair,
        frames=np.stack(frames), state=np.float32(np.stack(states)), obs_step=np.int32(steps),
        decision_obs=np.int32(at), chain=chain, stochastic_step=np.int32([d.stochastic_step for d in made]),
        behaviour_logprob=np.float32([d.logprob for d in made]), world_seed=np.int64([d.world_seed for d in made]),
        actions=np.stack([d.actions for d in made]), executed=np.int32(executed),
        env_reward=np.float32([0.0] * (decisions - 1) + [float(success)]), success=success,
        success_step=sum(executed) if success else -1, terminated=success, truncated=not success,
    )  # fmt: skip


@pytest.fixture(scope="module")
def episodes() -> list[Episode]:
    policy = tiny()
    pair = pair_of(policy)
    return [act(policy, pair, i, decisions=2 + i % 2, success=i % 2 == 0, init_state_id=i // 2) for i in range(6)]


def actor(
    policy: WAM | None = None, reward: RewardConfig | None = None, sampler: SamplerConfig = SAMPLER, **config: Any
) -> ActorFlowSDELearner:
    policy = policy or tiny(sampler=sampler)
    defaults = {"lr": 1e-3, "minibatch": 6}
    learner = ActorFlowSDELearner(
        ActorFlowSDEConfig(**(defaults | config)), sampler, reward or RewardConfig(imagine_steps=1), policy, run_seed=0
    )
    learner.remember(pair_of(policy), policy.export("world"), policy.export("actor"))
    return learner


def video(**config: Any) -> VideoSFTLearner:
    defaults = {"lr": 1e-3, "batch_size": 4, "steps_per_update": 3, "probe_windows": 4}
    return VideoSFTLearner(VideoSFTConfig(**(defaults | config)), tiny(), tiny(), run_seed=0)


def equal(a: Any, b: Any) -> bool:
    """Same nested structure, same bits."""
    if isinstance(a, torch.Tensor):
        return bool(torch.equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


# ------------------------------------------------------------------------------------------------ batching


def test_a_batch_has_memory_future_and_what_was_reached(episodes: list[Episode]) -> None:
    spec, episode = tiny().spec, episodes[0]
    batch = gather(episodes, [(0, 0), (0, 1)], spec)
    now = episode.decision_obs
    assert torch.equal(batch.memory[1, 0], torch.from_numpy(episode.frames[now[1]]))
    assert torch.equal(batch.future[0, 1], torch.from_numpy(episode.frames[now[1]]))
    assert torch.equal(batch.future[1, 1], batch.memory[1, 0])  # step 8 was never reached: the decision's own frame
    assert batch.reached.tolist() == [[True, True], [True, False]]
    assert batch.succeeded.tolist() == [False, True]
    assert torch.equal(batch.chain, torch.from_numpy(episode.chain))


def test_memory_repeats_the_first_frame_and_keeps_the_order_oldest_first(episodes: list[Episode]) -> None:
    spec, episode = replace(tiny().spec, memory=3), episodes[1]
    batch = gather(episodes, [(1, 0), (1, 2)], spec)
    first, second, third = (torch.from_numpy(episode.frames[n]) for n in episode.decision_obs)
    assert torch.equal(batch.memory[0], torch.stack([first, first, first]))
    assert torch.equal(batch.memory[1], torch.stack([first, second, third]))
    final = final_memory(episode, spec)
    assert final is not None and np.array_equal(final[0], episode.frames[[*episode.decision_obs[1:], -1]])
    assert final_memory(episodes[0], spec) is None  # ended at step 7, between offsets


def test_frames_beyond_the_executed_steps_are_seen_but_not_reached(episodes: list[Episode]) -> None:
    spec = replace(tiny().spec, imagined_offsets=(4, 6))
    batch = gather(episodes, [(1, 0)], spec)
    assert batch.seen.tolist() == [[True, True]] and batch.reached.tolist() == [[True, False]]


def test_success_belongs_to_the_chunk_in_which_it_came(episodes: list[Episode]) -> None:
    assert [success_decision(replace(episodes[0], success_step=s)) for s in (-1, 0, 1, 4, 5, 7)] == [-1, 0, 0, 0, 1, 1]


def test_time_major_places_every_decision_once(episodes: list[Episode]) -> None:
    picks = torch.tensor(all_decisions(episodes))
    shuffled = picks[torch.randperm(len(picks), generator=torch.Generator().manual_seed(0))]
    values, mask = to_time_major(shuffled[:, 0] * 10.0 + shuffled[:, 1], shuffled[:, 0], shuffled[:, 1], 6)
    assert mask.sum(dim=0).tolist() == [e.num_decisions for e in episodes]
    assert values[1, 3].item() == 31.0 and values[2, 0].item() == 0.0


# ------------------------------------------------------------------------------------------------ optimiser


def test_a_nan_is_skipped_counted_and_after_too_many_in_a_row_fatal() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = GuardedAdamW([weight], name="toy", lr=0.1, weight_decay=0.0, grad_clip=1.0, max_bad=3)
    for bad in (weight.sum() * float("nan"), (weight * 0.0).sqrt().sum() * float("inf")):
        assert optimizer.step(bad) == -1.0
    assert weight.tolist() == [1.0, 1.0]
    assert optimizer.step(weight.sum()) > 0 and optimizer.bad_in_a_row == 0
    before = weight.detach().clone()
    assert optimizer.step((weight - before).abs().sqrt().sum()) == -1.0  # finite loss, infinite gradient
    optimizer.step(weight.sum() / 0.0)
    with pytest.raises(RuntimeError, match="toy: loss or gradient was not finite 3 times in a row"):
        optimizer.step(weight.sum() / 0.0)
    assert torch.equal(weight, before) and optimizer.skipped == 5


# ------------------------------------------------------------------------------------------------ video learner


def test_video_sft_lowers_its_loss_and_trains_the_world_alone(episodes: list[Episode]) -> None:
    learner = video(steps_per_update=15, kl_weight=0.0, lr=3e-3)
    text, expert = copy.deepcopy(learner.policy.text.state_dict()), learner.policy.export("actor").digest
    first = learner.update(episodes[::2], index=0)
    last = learner.update(episodes[::2], index=1)
    assert last["video/flow_loss"] < 0.8 * first["video/flow_loss"]
    assert learner.policy.export("actor").digest == expert and equal(text, dict(learner.policy.text.state_dict()))
    assert learner.reference.export("world").digest == tiny().export("world").digest
    assert first["video/steps_count"] == 15 and first["video/windows_count"] == 6


def test_the_kl_weight_changes_the_gradient_and_the_reference_has_none(episodes: list[Episode]) -> None:
    def gradient(weight: float) -> torch.Tensor:
        learner = video()
        learner.probe(episodes)
        with torch.no_grad():  # away from the reference, where the KL has a slope
            for parameter in learner.policy.world.parameters():
                parameter.add_(0.05)
        terms = learner.loss_terms(episodes, [(0, 0), (1, 1)], np.random.default_rng(0))
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
        terms = learner.loss_terms(episodes, [(0, 0)], np.random.default_rng(0))
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


# ------------------------------------------------------------------------------------------------ actor learner


@pytest.mark.parametrize("advantage", ["gae", "group"])
@pytest.mark.parametrize("stochastic", ["one", "all"])
def test_with_lr_zero_the_ratio_is_exactly_one_and_nothing_clips(advantage: str, stochastic: str) -> None:
    sampler = SamplerConfig(stochastic=stochastic)  # type: ignore[arg-type]
    policy = tiny(sampler=sampler)
    made = [act(policy, pair_of(policy), i, success=i % 2 == 0, init_state_id=0) for i in range(4)]
    narrow = {"clip_low": 1e-6, "clip_high": 1e-6}
    learner = actor(policy, sampler=sampler, lr=0, advantage=advantage, epochs=2, minibatch=5, **narrow)
    before = learner.export().digest
    metrics = learner.update(made, index=0)
    assert metrics["actor/ratio_mean"] == 1.0 and metrics["actor/ratio_deviation_mean"] == 0.0
    assert all(value == 0.0 for name, value in metrics.items() if "clip_fraction" in name or "kl_" in name)
    assert metrics["actor/behaviour_logprob_gap_nats"] < 1e-3
    assert metrics["actor/grad_norm"] > 0 and learner.export().digest == before


def test_the_expert_and_critic_learn_and_the_world_does_not(episodes: list[Episode]) -> None:
    learner = actor(target_kl=0.0)
    world, expert, critic = learner.policy.export("world").digest, learner.export().digest, learner.critic.state_dict()
    critic = copy.deepcopy(critic)
    metrics = learner.update(episodes, index=0)
    assert learner.policy.export("world").digest == world and learner.export().digest != expert
    assert all(p.grad is None for p in learner.policy.world.parameters())
    assert any(not torch.equal(critic[name], tensor) for name, tensor in learner.critic.state_dict().items())
    assert metrics["actor/decisions_count"] == 15 and metrics["reward/success_share"] == 0.5
    assert metrics["actor/kl_to_behaviour_nats"] > 0 and metrics["actor/clip_fraction"] >= 0
    assert {f"actor/kl_to_behaviour_step{k}_nats" for k in range(3)} <= metrics.keys()


def test_the_critic_takes_gradient_and_gives_none_to_the_features() -> None:
    learner = actor()
    pooled = torch.randn(4, learner.policy.pooled_dim, requires_grad=True)
    with torch.no_grad():
        learner.critic.layers[-1].weight.fill_(0.1)
    learner.critic(pooled, torch.zeros(4, 2)).sum().backward()
    assert pooled.grad is None and all(p.grad is not None for p in learner.critic.parameters())


def test_the_critic_comes_to_explain_the_returns(episodes: list[Episode]) -> None:
    learner = actor(lr=0, critic_epochs=80)
    first = learner.update(episodes, index=0)
    assert first["actor/value_mean"] == 0.0
    last = learner.update(episodes, index=1)
    assert last["actor/explained_variance"] > first["actor/explained_variance"] + 0.3


def test_an_action_that_led_to_success_becomes_more_probable(episodes: list[Episode]) -> None:
    policy = tiny()
    made = [act(policy, pair_of(policy), i, success=i == 0, init_state_id=0) for i in range(4)]
    learner = actor(policy, RewardConfig(weight=0.0), advantage="group", epochs=4, target_kl=0.0, lr=3e-4)
    learner.update(made, index=0)

    def log_prob(episode: Episode) -> float:
        from learners.transitions import log_probs, transitions, velocities

        batch = gather([episode], all_decisions([episode]), policy.spec)
        with torch.no_grad():
            context = policy.world_context(policy.encode(batch.memory, batch.instruction), batch.world_seed)
            moves = transitions(batch.chain, batch.stochastic_step.tolist(), SAMPLER)
            v = velocities(policy, context, moves, batch.state)
        return float(log_probs(moves, v, policy.executed_mask(), SAMPLER).sum())

    change = [log_prob(episode) - float(episode.behaviour_logprob.sum()) for episode in made]
    assert change[0] > 0 and change[0] > max(change[1:])


def test_the_kl_to_the_base_changes_the_result_and_holds_the_expert_back(episodes: list[Episode]) -> None:
    kl = {}
    for weight in (0.0, 10.0):
        learner = actor(kl_to_base=weight, epochs=4, target_kl=0.0, critic_epochs=1)
        learner.update(episodes, index=0)
        kl[weight] = learner.update(episodes, index=1)["actor/kl_to_base_nats"]
    assert kl[10.0] < 0.5 * kl[0.0]


def test_the_target_kl_stops_an_update_early(episodes: list[Episode]) -> None:
    free, held = actor(epochs=3, target_kl=0.0), actor(epochs=3, target_kl=1e-3)
    assert free.update(episodes, index=0)["actor/stopped_early"] == 0.0
    metrics = held.update(episodes, index=0)
    assert metrics["actor/stopped_early"] == 1.0 and metrics["actor/kl_to_behaviour_nats"] <= 1e-3


def test_critic_warm_up_leaves_the_expert_alone(episodes: list[Episode]) -> None:
    learner = actor(critic_warmup_updates=1)
    before = learner.export().digest
    learner.update(episodes, index=0)
    assert learner.export().digest == before
    learner.update(episodes, index=1)
    assert learner.export().digest != before


def test_groups_that_all_succeed_or_all_fail_can_be_filtered(episodes: list[Episode]) -> None:
    learner = actor(advantage="group", filter_low=0.6, filter_high=0.9)
    before = learner.export().digest
    metrics = learner.update(episodes, index=0)
    assert metrics["actor/filtered_group_share"] == 1.0 and learner.export().digest == before
    assert actor(advantage="group").update(episodes, index=0)["actor/filtered_group_share"] == 0.0


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
    with pytest.raises(ValueError, match="no random transition"):
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
    with pytest.raises(ValueError, match="no random transition"):
        learner.update([replace(episodes[0], stochastic_step=np.int32([0, -1]))], index=1)
    assert learner.export().digest == trained


def moved_world(policy: WAM) -> Snapshot:
    """Another world of the same shape."""
    return to_snapshot("world", {k: v + 0.03 for k, v in policy.world.state_dict().items()})


def test_after_a_rebase_behaviour_is_still_scored_at_the_behaviour_weights(episodes: list[Episode]) -> None:
    learner = actor(lr=0)
    base_world = learner.trained_against_world
    new = moved_world(learner.policy)
    learner.rebase(new)
    assert learner.trained_against_world == base_world
    metrics = learner.update(episodes, index=0)
    assert metrics["actor/behaviour_logprob_gap_nats"] < 1e-3  # recomputed in the world that acted
    assert metrics["actor/ratio_deviation_mean"] > 0 and metrics["actor/kl_to_behaviour_nats"] > 0
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
    learner.rebase(moved_world(learner.policy))
    resumed.load_state(pickle.loads(pickle.dumps(learner.state())))
    assert equal(resumed.state(), learner.state())
    assert resumed.update(episodes, index=1) == learner.update(episodes, index=1)
    assert resumed.export().digest == learner.export().digest
    assert equal(resumed.state(), learner.state())


def test_an_actor_that_only_sees_the_ode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sampler\.eta = 0"):
        actor(sampler=SamplerConfig(eta=0.0))


@pytest.mark.parametrize(
    ("make", "name", "wrong", "value"),
    [
        (VideoSFTConfig, "video_learner", "lr", -1.0),
        (VideoSFTConfig, "video_learner", "ema_decay", 1.0),
        (VideoSFTConfig, "video_learner", "replay", 1.5),
        (ActorFlowSDEConfig, "actor_learner", "clip_low", 0.0),
        (ActorFlowSDEConfig, "actor_learner", "minibatch", 0),
        (ActorFlowSDEConfig, "actor_learner", "gamma", 1.1),
    ],
)
def test_a_wrong_learner_config_names_field_and_value(make: Any, name: str, wrong: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name}\.{wrong} = {value}: "):
        make(**{wrong: value})
