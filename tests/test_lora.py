"""LoRA of the expert: what is trained, what is published, and that its gradient is the full one's by the chain rule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from learners.expert import FullExpert, LoRAExpert
from tests.toy_learning import actor, equal, labelled, tiny, toy_episodes
from wamrl_ray.policy.flow_sde import NOISE_HEAD, SamplerConfig
from wamrl_ray.policy.wam import WAM
from wamrl_ray.types import Episode

NOISE = SamplerConfig(noise="flow_noise")


@pytest.fixture(scope="module")
def episodes() -> list[Episode]:
    return toy_episodes()[:2]


def weights(policy: WAM) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.expert.state_dict().items()}


def matrices(policy: WAM) -> set[str]:
    modules = dict(policy.expert.named_modules())
    return {f"{name}.weight" for name, module in modules.items() if isinstance(module, torch.nn.Linear)}


def test_the_untrained_additions_change_no_bit_of_the_expert() -> None:
    policy = tiny()
    before = policy.export("actor").digest
    LoRAExpert(policy, rank=2, scale=3.0, seed=0).write_back()
    assert policy.export("actor").digest == before


def test_training_changes_every_matrix_by_at_most_the_rank_and_nothing_else(episodes: list[Episode]) -> None:
    learner = actor(lora_rank=2, lora_scale=2.0, target_kl=0.0)
    base = weights(learner.policy)
    learner.update(episodes, index=0)
    after = weights(learner.policy)
    for name in base:
        change = after[name] - base[name]
        if name not in matrices(learner.policy):
            assert not change.any(), name
        elif min(change.shape) > 2:
            sizes = torch.linalg.svdvals(change.double())
            assert sizes[1] > 0 and sizes[2] < 1e-5 * sizes[0] + 1e-7, name


def test_the_published_expert_is_the_one_that_was_trained(episodes: list[Episode]) -> None:
    learner = actor(lora_rank=2, epochs=1, target_kl=0.0)
    start = learner.export().digest
    learner.update(episodes, index=0)
    assert learner.export().digest != start
    batch = labelled(learner, episodes)[0]
    context, sigma = batch.context_in(learner.policy), torch.full((len(batch),), 0.5)
    x = batch.transitions.x[:, 0]
    trained = learner.expert.predict(context, x, sigma, batch.state).velocity
    plain = tiny()
    plain.load_component(learner.export())
    assert torch.equal(trained, plain(context, x, sigma, batch.state).velocity)


def test_the_gradient_of_the_additions_is_the_full_gradient_by_the_chain_rule() -> None:
    """W = W_base + s B A: dL/dB = s G A^T and dL/dA = s B^T G with G = dL/dW."""
    full, low = tiny(), tiny()
    FullExpert(full)
    expert = LoRAExpert(low, rank=3, scale=0.7, seed=1)
    state = expert.state()
    generator = torch.Generator().manual_seed(2)
    state["up"] = {name: 0.1 * torch.randn(t.shape, generator=generator) for name, t in state["up"].items()}
    expert.load_state(state)
    expert.write_back()
    full.load_component(low.export("actor"))
    with torch.no_grad():
        obs = full.encode(torch.zeros(2, 1, 1, 32, 32, 3, dtype=torch.uint8), ["a", "b"])
        context = full.world_context(obs, [1, 2])
    x, sigma, robot = torch.randn((2, 4, 4), generator=generator), torch.tensor([0.5, 0.7]), torch.zeros(2, 2)
    for velocity in (full.velocity(context, x, sigma, robot), expert.predict(context, x, sigma, robot).velocity):
        velocity.square().sum().backward()
    down, up = expert._down, expert._up
    for key in up:
        gradient = full.expert.get_parameter(key.replace("/", ".")).grad
        torch.testing.assert_close(up[key].grad, 0.7 * gradient @ down[key].T, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(down[key].grad, 0.7 * up[key].T @ gradient, rtol=1e-4, atol=1e-5)
    assert {key.replace("/", ".") for key in up} == matrices(low)
    assert all(low.expert.get_parameter(name).grad is None for name in matrices(low))


def test_a_noise_head_has_no_base_and_is_trained_whole() -> None:
    policy = tiny(sampler=NOISE)
    trained = {id(p) for p in LoRAExpert(policy, rank=1, scale=1.0, seed=0).parameters()}
    head = [p for name, p in policy.expert.named_parameters() if name.startswith(NOISE_HEAD)]
    rest = [p for name, p in policy.expert.named_parameters() if not name.startswith(NOISE_HEAD)]
    assert len(head) == 4 and all(id(p) in trained for p in head) and not any(id(p) in trained for p in rest)
    learner = actor(policy, sampler=NOISE, lora_rank=1, epochs=1)
    before = weights(policy)
    learner.update(toy_episodes(tiny(sampler=NOISE))[:2], index=0)
    assert all(not torch.equal(before[n], t) for n, t in weights(policy).items() if n.startswith(NOISE_HEAD + "2"))


def test_rank_and_seed_decide_what_is_trained() -> None:
    policy = tiny()

    def made(rank: int = 2, seed: int = 0) -> LoRAExpert:
        return LoRAExpert(policy, rank=rank, scale=1.0, seed=seed)

    assert equal(made().state(), made().state()) and not equal(made().state(), made(seed=1).state())
    count = [sum(p.numel() for p in made(rank=rank).parameters()) for rank in (1, 2)]
    sizes = [policy.expert.get_parameter(name).shape for name in matrices(policy)]
    assert count == [sum(map(sum, sizes)), 2 * sum(map(sum, sizes))]


def test_the_additions_learn_what_pays_as_the_whole_expert_does(episodes: list[Episode]) -> None:
    for rank in (0, 4):
        learner = actor(lora_rank=rank, epochs=8, target_kl=0.0, kl_to_base=0.0)
        assert learner.update(episodes, index=0)["actor/policy_loss"] < -0.05, rank
