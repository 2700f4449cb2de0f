"""Every algorithm of the actor learner: exact ratios at lr 0, one gradient for all micro-batches, exact resumption."""

from __future__ import annotations

import itertools
import pickle
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from envs.reach import ReachConfig
from learners.actor_config import ActorFlowSDEConfig
from learners.advantages import GroupConfig
from learners.awr import AWRConfig
from learners.gae import GAEConfig
from learners.ppo import PPOConfig
from learners.video_sft import VideoSFTConfig
from tests.toy_learning import act, actor, equal, gradients, moved, pair_of, tiny, toy_episodes
from wamrl_ray.config import BrokerConfig, Config, RolloutConfig, from_json, to_json
from wamrl_ray.local import build_local
from wamrl_ray.policy.flow_sde import SamplerConfig
from wamrl_ray.policy.wam import WAM, WAMConfig
from wamrl_ray.rewards.reconstruction import RewardConfig
from wamrl_ray.types import Episode, Metrics

NARROW = {"clip_low": 1e-6, "clip_high": 1e-6}
OBJECTIVES: dict[str, PPOConfig | AWRConfig] = {
    "ppo": PPOConfig(**NARROW),
    "joint": PPOConfig(**NARROW, ratio="joint"),
    "sensitivity": PPOConfig(**NARROW, clip_schedule="sensitivity", denoise_discount=0.9),
    "awr": AWRConfig(),
}
SAMPLERS = {
    "sde_one": SamplerConfig(),
    "sde_all": SamplerConfig(stochastic="all"),
    "sde_all_last": SamplerConfig(stochastic="all", exclude_last=False),
    "noise_one": SamplerConfig(noise="flow_noise", stochastic="one"),
    "noise_all": SamplerConfig(noise="flow_noise", stochastic="all"),
}
PAIRS = list(itertools.product(OBJECTIVES, SAMPLERS))
"""Each goes with a draw of the six switches below, made so that every two values of two switches meet somewhere."""
DRAWS = random.Random(21)
SWITCHES: list[dict[str, Any]] = [
    {
        "advantage": DRAWS.choice([GAEConfig(critic_epochs=2), GroupConfig()]),
        "lora_rank": DRAWS.choice([0, 2]),
        "precision": DRAWS.choice(["fp32", "bf16"]),
        "reuse_context": DRAWS.choice([True, False]),
        "micro_batch": DRAWS.choice([2, 5]),
        "mask_unexecuted": DRAWS.choice([True, False]),
    }
    for _ in PAIRS
]


@cache
def acted(sampler: SamplerConfig) -> tuple[Episode, ...]:
    """Four episodes of two decisions."""
    policy = tiny(sampler=sampler)
    made = [act(policy, pair_of(policy), i, decisions=2, success=i % 2 == 0, init_state_id=i // 2) for i in range(4)]
    return tuple(made)


def unmoved(metrics: Metrics) -> None:
    """Ratio 1, nothing clipped, no distance from the update's start: exactly."""
    assert metrics["actor/ratio_mean"] == 1.0 and metrics["actor/ratio_deviation_mean"] == 0.0
    zero = [name for name in metrics if "clip_fraction" in name or "kl_to_start" in name or "approx_kl" in name]
    assert len(zero) >= 5 and all(metrics[name] == 0.0 for name in zero)
    assert metrics["actor/grad_norm"] > 0


@pytest.mark.parametrize(("objective", "sampler"), PAIRS)
def test_at_lr_zero_nothing_moves_in_any_algorithm_nor_after_a_world_update(objective: str, sampler: str) -> None:
    chosen = SWITCHES[PAIRS.index((objective, sampler))]
    learner = actor(
        tiny(sampler=SAMPLERS[sampler]), RewardConfig(weight=0.0), SAMPLERS[sampler], lr=0.0, epochs=1, batch_size=5,
        objective=OBJECTIVES[objective], **chosen,
    )  # fmt: skip
    learner.config = replace(learner.config, entropy_bonus=0.01 if learner.sampler.learned_std else 0.0)
    before, episodes = learner.export().digest, acted(SAMPLERS[sampler])
    in_step = learner.update(episodes, index=0)
    unmoved(in_step)
    assert in_step["actor/kl_to_base_nats"] == in_step["actor/kl_to_behaviour_nats"] == 0.0
    assert in_step["actor/importance_weight_mean"] == 1.0

    learner.rebase(moved(learner.policy, "world"))
    stale = learner.update(episodes, index=1)
    unmoved(stale)
    assert stale["actor/kl_to_base_nats"] == 0.0 < stale["actor/kl_to_behaviour_nats"]
    assert (stale["actor/importance_weight_mean"] == 1.0) == (objective == "awr")
    if chosen["precision"] == "fp32":  # recomputed in the world that acted
        assert max(m["actor/behaviour_logprob_gap_nats"] for m in (in_step, stale)) < 2e-3
    assert learner.export().digest == before
    assert learner.trained_against_world == learner.world.digest


def test_against_the_policy_that_acted_an_exponential_clip_moves_nothing_until_another_world_is_read() -> None:
    narrow = PPOConfig(**NARROW, clip_schedule="exponential", proximal="behaviour")
    learner = actor(lr=0.0, epochs=1, objective=narrow)
    unmoved(learner.update(acted(SAMPLERS["sde_one"]), index=0))
    learner.rebase(moved(learner.policy, "world"))
    stale = learner.update(acted(SAMPLERS["sde_one"]), index=1)
    assert stale["actor/clip_fraction"] > 0 and stale["actor/importance_weight_mean"] == 1.0


def test_every_two_values_of_two_switches_meet() -> None:
    rows = [{"objective": o, "sampler": s} | drawn for (o, s), drawn in zip(PAIRS, SWITCHES, strict=True)]
    names = list(rows[0])
    for a, b in itertools.combinations(names, 2):
        values = [{str(row[name]) for row in rows} for name in (a, b)]
        met = {(str(row[a]), str(row[b])) for row in rows}
        assert len(met) == len(values[0]) * len(values[1]), (a, b)


def test_episodes_of_two_pairs_in_one_update_start_at_ratio_one_and_only_the_stale_ones_are_weighted() -> None:
    old, new = tiny(), tiny()
    new.load_component(moved(new, "actor", 0.01))
    learner = actor(tiny(), lr=0.0, micro_batch=4)
    learner.policy.load_component(new.export("actor"))
    learner.remember(pair_of(new, 1), new.export("world"), new.export("actor"))
    mixed = toy_episodes(old)[:3] + toy_episodes(new, 1)[3:]
    metrics = learner.update(mixed, index=0)
    unmoved(metrics)
    assert metrics["actor/behaviour_logprob_gap_nats"] < 1e-3 and metrics["actor/kl_to_behaviour_nats"] > 0
    fresh, stale = learner.update(mixed[3:], index=1), learner.update(mixed[:3], index=1)
    assert fresh["actor/importance_weight_mean"] == 1.0 != stale["actor/importance_weight_mean"]
    assert fresh["actor/kl_to_behaviour_nats"] == 0.0 < stale["actor/kl_to_behaviour_nats"]


LOUD = SamplerConfig(noise="flow_noise", stochastic="all", std_min=0.5, std_max=1.0)
"""So that an untrained policy stumbles into some success."""


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"sampler": LOUD, "lora_rank": 2, "precision": "bf16", "reuse_context": False},
    ],
)
def test_in_a_synchronous_run_at_actor_lr_zero_nothing_moves_while_the_published_world_does(
    algorithm: dict[str, Any], tmp_path: Path
) -> None:
    sampler = algorithm.pop("sampler", SamplerConfig())
    config = Config(
        env=ReachConfig(max_steps=8, speed=0.5, radius=0.25),
        sampler=sampler,
        rollout=RolloutConfig(episodes_per_iteration=8, group_size=2),
        video_learner=VideoSFTConfig(lr=1e-3, steps_per_update=1, batch_size=4),
        actor_learner=ActorFlowSDEConfig(lr=0.0, epochs=1, batch_size=8, micro_batch=4, **algorithm),
        broker=BrokerConfig(max_feature_drift=1e9),
    )
    system = build_local(config, tmp_path, lambda: WAM(WAMConfig.debug(), sampler, seed=0))
    system.start()
    worlds = {system.broker.current().world}
    actors = {system.broker.current().actor}
    for _ in range(3):
        metrics = system.step()
        unmoved(metrics)
        assert metrics["actor/kl_to_behaviour_nats"] == metrics["actor/kl_to_base_nats"] == 0.0
        assert metrics["actor/importance_weight_mean"] == 1.0
        worlds.add(system.broker.current().world)
        actors.add(system.broker.current().actor)
    system.close()
    assert len(worlds) >= 3 and len(actors) == 1


# ------------------------------------------------------------------------------------------------ micro-batches


MICRO = {
    "ppo": {"objective": PPOConfig()},
    "awr": {"objective": AWRConfig()},
    "entropy": {"entropy_bonus": 1.0, "sampler": SAMPLERS["noise_all"]},
    "lora": {"lora_rank": 2, "advantage": GroupConfig(), "sampler": SAMPLERS["sde_all"]},
}


@pytest.mark.parametrize("name", MICRO)
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_the_gradient_is_that_of_the_whole_batch_whatever_the_micro_batch(name: str, micro_batch: int) -> None:
    algorithm: dict[str, Any] = dict(MICRO[name])
    sampler = algorithm.pop("sampler", SAMPLERS["sde_one"])
    taken = []
    for size in (100, micro_batch):
        learner = actor(
            tiny(sampler=sampler), sampler=sampler, lr=0.0, epochs=2, batch_size=8, micro_batch=size, kl_to_base=0.5,
            **algorithm,
        )  # fmt: skip
        learner.base = moved(learner.policy, "actor", 0.02)  # else the anchor has no gradient at the start
        taken.append(gradients(learner, acted(sampler)))
    whole, parts = taken
    assert len(whole) == len(parts) == 2
    for one, other in zip(whole, parts, strict=True):
        assert float((one - other).norm() / one.norm()) < 1e-5


def test_decisions_that_are_not_kept_change_nothing_about_the_gradient() -> None:
    episodes = list(acted(SAMPLERS["sde_one"]))
    episodes[2] = replace(episodes[2], success=False, success_step=-1)  # starts 0 and 1: one success of two, and none
    filtered = {"lr": 0.0, "epochs": 1, "batch_size": 100, "advantage": GroupConfig(filter_low=0.1, filter_high=0.9)}
    (alone,) = gradients(actor(**filtered), episodes[:2])
    for size in (100, 3):
        (masked,) = gradients(actor(**filtered, micro_batch=size), episodes)
        assert float((masked - alone).norm() / alone.norm()) < 1e-5


@pytest.mark.parametrize("name", ["ppo", "awr", "entropy"])
def test_computing_the_features_anew_changes_no_bit(name: str) -> None:
    algorithm: dict[str, Any] = dict(MICRO[name])
    sampler = algorithm.pop("sampler", SAMPLERS["sde_one"])
    results = []
    for reuse in (True, False):
        learner = actor(
            tiny(sampler=sampler), sampler=sampler, epochs=1, batch_size=5, micro_batch=3, reuse_context=reuse,
            **algorithm,
        )  # fmt: skip
        metrics = [learner.update(acted(sampler), index=0)]
        learner.rebase(moved(learner.policy, "world", 0.001))
        metrics.append(learner.update(acted(sampler), index=1))
        results.append((metrics, learner.export().digest))
    assert results[0] == results[1]
    assert results[0][1] != actor(tiny(sampler=sampler), sampler=sampler).export().digest


# ------------------------------------------------------------------------------------------------ state


STATES: dict[str, dict[str, Any]] = {
    "lora": {"lora_rank": 2},
    "flow_noise": {"sampler": SAMPLERS["noise_all"], "entropy_bonus": 0.01},
    "lora_flow_noise": {"sampler": SAMPLERS["noise_one"], "lora_rank": 2, "lora_scale": 2.0},
    "awr": {"objective": AWRConfig(), "advantage": GroupConfig()},
    "group_joint": {"advantage": GroupConfig(), "objective": PPOConfig(ratio="joint"), "sampler": SAMPLERS["sde_all"]},
    "bf16_stored": {"precision": "bf16", "behaviour_logprob": "stored", "mask_unexecuted": False},
}


@pytest.mark.parametrize("name", STATES)
def test_every_algorithm_resumes_bit_for_bit_in_the_middle_of_a_run(name: str) -> None:
    algorithm = dict(STATES[name])
    sampler = algorithm.pop("sampler", SAMPLERS["sde_one"])

    def made(policy: WAM) -> Any:
        return actor(policy, sampler=sampler, epochs=1, batch_size=5, target_kl=0.0, **algorithm)

    learner, other = made(tiny(sampler=sampler)), tiny(sampler=sampler)
    for component in ("world", "actor"):
        other.load_component(moved(other, component))  # type: ignore[arg-type]
    resumed = made(other)
    start = learner.export().digest
    learner.update(acted(sampler), index=0)
    acting = tiny(sampler=sampler)
    acting.load_component(learner.export())
    learner.remember(pair_of(acting, 1), acting.export("world"), acting.export("actor"))
    learner.rebase(moved(learner.policy, "world", 0.001))
    resumed.load_state(pickle.loads(pickle.dumps(learner.state())))
    assert equal(resumed.state(), learner.state()) and learner.export().digest != start

    later = [*acted(sampler)[:2], act(acting, pair_of(acting, 1), 7, success=True), act(acting, pair_of(acting, 1), 8)]
    assert resumed.update(later, index=1) == learner.update(later, index=1)
    assert equal(resumed.state(), learner.state())


@pytest.mark.parametrize("name", ["lora_flow_noise", "awr", "bf16_stored"])
def test_an_update_of_any_algorithm_is_a_function_of_state_episodes_and_index(name: str) -> None:
    algorithm = dict(STATES[name])
    sampler = algorithm.pop("sampler", SAMPLERS["sde_one"])
    results = []
    for index in (3, 3, 4):
        torch.manual_seed(len(results))  # nothing may draw from the global generator
        learner = actor(tiny(sampler=sampler), sampler=sampler, epochs=1, batch_size=5, **algorithm)
        results.append((learner.update(acted(sampler), index=index), learner.export().digest))
    assert results[0] == results[1] and results[0][1] != results[2][1]


def test_the_configs_of_all_algorithms_survive_json() -> None:
    for name, chosen in STATES.items():
        sampler = chosen.get("sampler", SAMPLERS["sde_one"])
        rest = {key: value for key, value in chosen.items() if key != "sampler"}
        config = Config(sampler=sampler, actor_learner=ActorFlowSDEConfig(**rest))
        assert from_json(to_json(config)) == config, name
