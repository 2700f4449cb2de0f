"""What objectives and ways to explore do to a policy: AWR imitates what paid, Flow-Noise learns its noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learners.advantages import GroupConfig
from learners.awr import AWRConfig
from tests.micro_batches import estimate_of
from tests.toy_learning import act, actor, labelled, moved, pair_of, tiny, toy_episodes
from wamrl_ray.policy.bases import load_base, save_base
from wamrl_ray.policy.flow_sde import NOISE_HEAD, Prediction, SamplerConfig, bounded_std
from wamrl_ray.policy.wam import WAM
from wamrl_ray.rewards.reconstruction import RewardConfig
from wamrl_ray.types import Episode

SUCCESS = RewardConfig(weight=0.0)
NOISE = SamplerConfig(noise="flow_noise", stochastic="all")
HEAD = {f"{NOISE_HEAD}{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")}


@pytest.fixture(scope="module")
def noisy() -> list[Episode]:
    return toy_episodes(tiny(sampler=NOISE))


def noise_actor(policy: WAM | None = None, **config: Any) -> Any:
    defaults = {"target_kl": 0.0, "kl_to_base": 0.0, "epochs": 2}
    return actor(policy or tiny(sampler=NOISE), SUCCESS, NOISE, **(defaults | config))


# ------------------------------------------------------------------------------------------------ AWR


def ode(policy: WAM, episode: Episode) -> np.ndarray:
    """The chunk (H, D) the policy would act in the episode's first moment, from the same noise."""
    decision = policy.decide(
        episode.frames[0][None], episode.state[0], episode.instruction, action_seed=100 * episode.ticket.ticket_id,
        world_seed=int(episode.world_seed[0]), stochastic=False,
    )  # fmt: skip
    return decision.chain[-1]


def test_awr_moves_the_action_toward_the_chunk_that_paid() -> None:
    policy = tiny()
    lost = act(policy, pair_of(policy), 0, decisions=1)
    won = replace(lost, success=True, success_step=3, terminated=True, truncated=False)
    before = ode(policy, won)
    push = np.float32(np.random.default_rng(0).choice([-1.0, 1.0], before.shape))
    chunks = {True: before + push, False: before - push}
    made = [replace(e, chain=np.concatenate([e.chain[:, :-1], chunks[e.success][None, None]], 1)) for e in (won, lost)]
    learner = actor(policy, SUCCESS, objective=AWRConfig(), advantage=GroupConfig(), epochs=15, target_kl=0.0)
    learner.update(made, index=0)
    change = ode(learner.policy, won) - before
    toward = float((change * push).sum() / np.linalg.norm(change) / np.linalg.norm(push))
    assert toward > 0.3


@pytest.mark.parametrize("target", ["residual", "chunk"])
def test_awr_with_equal_advantages_changes_nothing_or_is_plain_imitation_whatever_the_temperature(target: Any) -> None:
    episodes, before = toy_episodes(), tiny().export("actor").digest
    digests = {}
    for kind, made in (("equal", [replace(e, success_step=-1) for e in episodes]), ("unequal", episodes)):
        for temperature in (0.1, 2.0):
            objective = AWRConfig(target=target, temperature=temperature)
            learner = actor(tiny(), SUCCESS, advantage=GroupConfig(), objective=objective)
            learner.update(made, index=0)
            digests[kind, temperature] = learner.export().digest
    assert digests["equal", 0.1] == digests["equal", 2.0], "all weights are 1"
    assert (digests["equal", 0.1] == before) == (target == "residual")
    assert len({before, *digests.values()}) == (3 if target == "residual" else 4)


def test_awr_denoises_the_chunk_from_where_its_chain_began() -> None:
    episodes = toy_episodes()
    learner = actor(objective=AWRConfig(draws=20))
    (batch,) = labelled(actor(batch_size=99, micro_batch=99), episodes)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watched(context: Any, x: torch.Tensor, sigma: torch.Tensor, state: torch.Tensor) -> Prediction:
        seen.append((x, sigma))
        return Prediction(velocity=torch.zeros_like(x))

    count = len(batch)
    learner.policy_update.objective.prepare(watched, lambda b: b.context, [batch], estimate_of(torch.zeros(count)), 0)
    x, sigma = seen[0]
    x, sigma = x.reshape(count, 20, *x.shape[1:]), sigma.reshape(count, 20)
    for i in range(count):
        chain = torch.from_numpy(episodes[int(batch.episode[i])].chain[int(batch.decision[i])])
        assert torch.equal(batch.noise[i], chain[0]) and torch.equal(batch.clean[i], chain[-1])
        for at, level in zip(x[i], sigma[i], strict=True):
            torch.testing.assert_close(at, level * chain[0] + (1 - level) * chain[-1])


# ------------------------------------------------------------------------------------------------ Flow-Noise


def test_flow_noise_learns_its_noise_and_publishes_it(noisy: list[Episode]) -> None:
    learner = noise_actor()
    names = {name for name, _, _ in learner.export().layout}
    assert names >= HEAD and {name for name, _, _ in tiny().export("actor").layout} == names - HEAD
    (batch,) = labelled(noise_actor(batch_size=99, micro_batch=99), noisy)
    assert batch.behaviour.raw_std is not None
    std = bounded_std(batch.behaviour.raw_std, NOISE)
    torch.testing.assert_close(std, torch.full_like(std, (0.08 * 0.16) ** 0.5))

    learner.update(noisy, index=0)
    acting = tiny(sampler=NOISE)
    acting.load_component(learner.export())
    with torch.no_grad():
        out = acting(batch.context_in(acting), batch.transitions.x[:, 0], torch.ones(len(batch)), batch.state)
    assert out.raw_std is not None
    learnt = bounded_std(out.raw_std, NOISE)
    assert float(learnt.std()) > 1e-4 and float(learnt.min()) >= 0.08 and float(learnt.max()) <= 0.16
    with pytest.raises(ValueError, match="actor"):
        tiny().load_component(learner.export())


def test_the_entropy_bonus_raises_the_entropy(noisy: list[Episode]) -> None:
    entropy = {}
    for bonus in (1e-9, 20.0):
        learner = noise_actor(entropy_bonus=bonus, epochs=3)
        learner.update(noisy, index=0)
        entropy[bonus] = learner.update(noisy, index=1)["actor/entropy_nats"]
    start = float(np.log((0.08 * 0.16) ** 0.5) + 0.5 * np.log(2 * np.pi * np.e))
    assert entropy[20.0] > max(entropy[1e-9], start) + 0.01
    assert noise_actor(entropy_bonus=1.0, lr=0.0).update(noisy, index=0)["actor/entropy_nats"] == pytest.approx(start)


def test_the_kl_to_the_base_holds_flow_noise_back_too(noisy: list[Episode]) -> None:
    kl = {}
    for weight in (0.0, 10.0):
        learner = noise_actor(kl_to_base=weight)
        learner.update(noisy, index=0)
        kl[weight] = learner.update(noisy, index=1)["actor/kl_to_base_nats"]
    assert kl[10.0] < 0.5 * kl[0.0]


def test_a_base_is_loaded_with_or_without_a_noise_head_whichever_way_it_was_saved(tmp_path: Path) -> None:
    plain, noise = tiny(), tiny(sampler=NOISE)
    noise.load_component(moved(noise, "actor"))
    save_base(plain, tmp_path / "plain", torch.float32)
    save_base(noise, tmp_path / "noise", torch.float32)
    fresh, kept = load_base(tmp_path / "plain", NOISE), load_base(tmp_path / "noise", NOISE)
    dropped = load_base(tmp_path / "noise")
    assert not fresh.expert.get_parameter(f"{NOISE_HEAD}2.weight").any()
    assert kept.export("actor").digest == noise.export("actor").digest
    rest = {name: t for name, t in noise.expert.state_dict().items() if name not in HEAD}
    assert dropped.expert.state_dict().keys() == rest.keys()
    assert all(torch.equal(dropped.expert.state_dict()[name], tensor) for name, tensor in rest.items())
    assert len({policy.interface_digest for policy in (fresh, kept, dropped)}) == 1


def test_a_policy_without_a_noise_head_is_refused_for_flow_noise() -> None:
    with pytest.raises(ValueError, match=r"sampler\.noise = 'flow_noise': the policy was built for 'flow_sde'"):
        actor(tiny(), sampler=NOISE)
