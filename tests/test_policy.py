"""The world-action policy: cached attention, batch invariance, weights, codec, normaliser, names."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_ltx import LTXVideoTransformer3DModel

from wamrl_ray.policy.action_expert import action_rope
from wamrl_ray.policy.bases import load_base, save_base
from wamrl_ray.policy.codec import PatchCodec, to_uint8
from wamrl_ray.policy.flow_sde import SamplerConfig, gaussian_log_prob, transition_mean, transition_std
from wamrl_ray.policy.normalizer import MIN_HALF_RANGE, Normalizer
from wamrl_ray.policy.wam import WAM, Context, ObsLatents, WAMConfig
from wamrl_ray.policy.weights import from_snapshot
from wamrl_ray.policy.world_model import WorldConfig, fold, unfold, video_rope

TWO_VIEWS = replace(
    WAMConfig.debug(), views=("agent", "wrist"), memory=2, world=WorldConfig(layers=4, heads=2, head_dim=16)
)


@pytest.fixture
def policy() -> WAM:
    return WAM(WAMConfig.debug(), seed=1)


def observations(policy: WAM, batch: int, seed: int = 0) -> tuple[ObsLatents, torch.Tensor, torch.Tensor]:
    rng, spec = np.random.default_rng(seed), policy.spec
    shape = (batch, spec.memory, len(spec.views), spec.resolution, spec.resolution, 3)
    frames = torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8))
    state = torch.from_numpy(rng.normal(size=(batch, spec.state_dim)).astype(np.float32))
    return policy.encode(frames, ["go to the red disc"] * batch), frames, state


@torch.no_grad()
def test_cached_keys_and_values_change_no_bit_and_agree_with_the_stock_blocks(policy: WAM) -> None:
    obs, _, state = observations(policy, 3)
    context = policy.world_context(obs, [5, 6, 7])
    x, sigma = torch.randn(3, policy.spec.horizon, policy.spec.channels), torch.tensor([1.0, 0.5, 0.25])
    cached = replace(context, keys_values=policy.expert.keys_values(context.features))
    ours = policy.velocity(cached, x, sigma, state)
    assert torch.equal(ours, policy.velocity(context, x, sigma, state))

    expert, length = policy.expert, policy.spec.horizon + 1
    token = torch.cat([torch.zeros(3, policy.spec.action_dim), policy.normalizer.normalize_state(state)], dim=1)
    hidden = expert.action_proj_in(torch.cat([token[:, None], x], dim=1))
    times = torch.stack([torch.zeros(3), *[1000.0 * sigma] * policy.spec.horizon], dim=1)
    ada, embedded = expert.action_time_embed(times.flatten(), batch_size=3, hidden_dtype=x.dtype)
    rope = action_rope(length, hidden.shape[-1], expert.rope_base, x.device)
    for block, features in zip(expert.action_blocks, context.features, strict=True):
        hidden = block(hidden, features, ada.reshape(3, length, -1), rope)
    table = expert.action_scale_shift_table[None, None] + embedded.reshape(3, length, 1, -1)
    stock = expert.action_proj_out(expert.norm_out(hidden) * (1 + table[:, :, 1]) + table[:, :, 0])[:, 1:]
    # Products of other shapes: which bits they round to is the CPU's choice.
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_the_world_models_features_have_the_bits_of_the_stock_blocks() -> None:
    policy = WAM(TWO_VIEWS, seed=0)
    world, views, per_frame, sigma = policy.world, 2, policy.config.grid**2, torch.tensor([1.0, 0.5, 0.25])
    obs, _, _ = observations(policy, 3)
    future = policy.world_noise([5, 6, 7])
    ours = policy.world_forward(obs, future, sigma).features

    frames = obs.memory.shape[2] + future.shape[2]
    tokens = torch.cat([obs.memory, future], dim=2).reshape(3 * views, frames * per_frame, -1)
    hidden = world.proj_in(tokens) + world.position_embed.repeat(frames, 1)
    ada, _ = world._modulation(sigma, views, obs.memory.shape[2] * per_frame, future.shape[2] * per_frame)
    rope = world.rope(hidden, frames, policy.config.grid, policy.config.grid, policy.config.world.rope_scale)
    caption, bias = world.caption_projection(obs.text), ((1.0 - obs.text_mask) * -10000.0).unsqueeze(1)
    for i, (block, features) in enumerate(zip(world.transformer_blocks, ours, strict=True)):
        if i % 3 == 0:  # across the views
            folded = [fold(x, views) for x in (hidden, ada, *rope)]
            hidden = unfold(block(folded[0], caption, folded[1], (folded[2], folded[3]), bias), views)
        else:
            hidden = block(hidden, caption.repeat_interleave(views, 0), ada, rope, bias.repeat_interleave(views, 0))
        assert torch.equal(features, fold(hidden, views)), f"block {i}"


def test_what_acting_has_cached_can_be_trained_through(policy: WAM) -> None:
    _, frames, state = observations(policy, 1)
    video_rope.cache_clear()
    action_rope.cache_clear()
    policy.text.forget()
    policy.decide(frames[0].numpy(), state[0].numpy(), "go", action_seed=0, world_seed=0, stochastic=True)
    obs = policy.encode(frames, ["go"])
    context = policy.world_context(obs, [0])
    policy.velocity(context, torch.zeros(1, 4, 4), torch.ones(1), state).sum().backward()
    assert policy.world.caption_projection.linear_1.weight.grad is not None
    assert policy.expert.action_blocks[0].attn1.to_q.weight.grad is not None


def test_an_action_has_the_same_bits_whatever_was_decided_before(policy: WAM) -> None:
    _, frames, state = observations(policy, 4)

    def decide(i: int) -> bytes:
        decision = policy.decide(
            frames[i].numpy(), state[i].numpy(), "go", action_seed=i, world_seed=100 + i, stochastic=True
        )
        return decision.chain.tobytes() + decision.actions.tobytes()

    alone = [decide(i) for i in range(4)]
    assert [decide(i) for i in reversed(range(4))] == alone[::-1]
    assert len(set(alone)) == 4


def test_the_ode_sampler_is_euler_and_the_sde_sampler_moves_only_executed_actions(policy: WAM) -> None:
    _, frames, state = observations(policy, 1)
    policy.sampler = SamplerConfig(num_steps=4, eta=0.5)
    arguments = (frames[0].numpy(), state[0].numpy(), "go")
    ode = policy.decide(*arguments, action_seed=3, world_seed=4, stochastic=False)
    obs, _, _ = observations(policy, 1)
    obs = policy.encode(frames, ["go"])
    x = torch.from_numpy(ode.chain[0])[None]
    with torch.no_grad():
        context = policy.world_context(obs, [4])
        for k, sigma in enumerate((1.0, 0.75, 0.5, 0.25)):
            x = x - 0.25 * policy.velocity(context, x, torch.tensor([sigma]), state)
            np.testing.assert_allclose(ode.chain[k + 1], x[0].numpy(), rtol=0, atol=2e-5)
    assert ode.stochastic_step == -1 and ode.logprob == 0.0

    sde = policy.decide(*arguments, action_seed=3, world_seed=4, stochastic=True)
    k, mask = sde.stochastic_step, policy.executed_mask().numpy() > 0
    np.testing.assert_array_equal(sde.chain[: k + 1], ode.chain[: k + 1])
    changed = sde.chain[k + 1] != ode.chain[k + 1]
    assert changed[mask].all() and not changed[~mask].any()


@torch.no_grad()
@pytest.mark.parametrize("stochastic_step", [-1, 0, 1, 2])
def test_a_decision_has_the_bits_of_one_whose_every_step_computes_keys_and_values_anew(stochastic_step: int) -> None:
    policy = WAM(TWO_VIEWS, seed=0)
    _, frames, state = observations(policy, 1)
    steps, eta, mask = policy.sampler.num_steps, policy.sampler.eta, policy.executed_mask()
    stochastic, arguments = stochastic_step >= 0, (frames[0].numpy(), state[0].numpy(), "go")
    seeds = range(20) if stochastic else [0]
    decisions = (policy.decide(*arguments, action_seed=i, world_seed=7, stochastic=stochastic) for i in seeds)
    action_seed, decision = next((i, d) for i, d in enumerate(decisions) if d.stochastic_step == stochastic_step)

    context = policy.world_context(policy.encode(frames, ["go"]), [7])
    assert context.keys_values is None, "so `velocity` computes them from the features each time"
    generator = torch.Generator().manual_seed(action_seed)
    x = torch.randn((1, policy.spec.horizon, policy.spec.channels), generator=generator)
    if stochastic:
        torch.randint(steps - 1, (), generator=generator)  # the draw of the stochastic step
    chain, logprob = [x], torch.zeros(1)
    for k, sigma in enumerate((1.0, 0.75, 0.5, 0.25)):
        v = policy.velocity(context, x, torch.tensor([sigma]), state)
        euler = transition_mean(x, v, k, steps, 0.0)
        if k == stochastic_step:
            mean, std = transition_mean(x, v, k, steps, eta), transition_std(k, steps, eta)
            euler = torch.where(mask > 0, mean + std * torch.randn(x.shape, generator=generator), euler)
            logprob = gaussian_log_prob(euler, mean, std, mask)
        x = euler
        chain.append(x)
    assert decision.chain.tobytes() == torch.cat(chain).numpy().tobytes()
    assert decision.logprob == float(logprob)
    actions = policy.normalizer.denormalize_action(x[0, : policy.spec.executed, : policy.spec.action_dim])
    assert decision.actions.tobytes() == actions.numpy().tobytes()


def test_a_pair_is_swapped_in_whole_or_not_at_all(policy: WAM) -> None:
    other = WAM(WAMConfig.debug(), seed=2)
    world, actor = other.export("world"), other.export("actor")
    before = policy.export("world").digest, policy.export("actor").digest
    bigger = WAM(replace(WAMConfig.debug(), world=WorldConfig(layers=2, heads=2, head_dim=32)), seed=2)
    with pytest.raises(ValueError, match="architecture"):
        policy.load_pair(world, bigger.export("actor"))
    assert (policy.export("world").digest, policy.export("actor").digest) == before
    damaged = replace(actor, buffer=np.bitwise_xor(actor.buffer, np.uint8(1)))
    with pytest.raises(ValueError, match="damaged"):
        policy.load_pair(world, damaged)
    assert (policy.export("world").digest, policy.export("actor").digest) == before
    policy.load_pair(world, actor)
    assert (policy.export("world").digest, policy.export("actor").digest) == (world.digest, actor.digest)
    assert all(torch.equal(t, other.world.state_dict()[n]) for n, t in from_snapshot(world).items())


def test_the_interface_digest_follows_normaliser_and_architecture_but_not_the_trained_halves(policy: WAM) -> None:
    digest = policy.interface_digest
    with torch.no_grad():
        next(policy.world.parameters()).add_(1.0)
    assert policy.interface_digest == digest
    policy.normalizer.action_half.mul_(2.0)
    assert policy.interface_digest != digest
    assert WAM(replace(WAMConfig.debug(), executed=3), seed=1).interface_digest != digest


def test_a_base_round_trips_and_a_foreign_one_is_refused(policy: WAM, tmp_path: Path) -> None:
    save_base(policy, tmp_path / "a")
    first, second = load_base(tmp_path / "a"), load_base(tmp_path / "a")
    assert first.export("world").digest == second.export("world").digest
    assert first.interface_digest == second.interface_digest
    torch.testing.assert_close(first.world.proj_in.weight, policy.world.proj_in.weight, rtol=1e-3, atol=1e-4)
    (tmp_path / "a" / "config.json").write_text('{"horizon": "long"}')
    with pytest.raises(ValueError, match="horizon"):
        load_base(tmp_path / "a")
    with pytest.raises(ValueError, match="shipped names"):
        load_base("no_such_base")


def test_the_patch_codec_inverts_and_keeps_patches_apart() -> None:
    codec = PatchCodec(patch=4)
    frames = torch.randint(0, 256, (2, 3, 8, 8, 3), dtype=torch.uint8)
    latents = codec.encode(frames)
    assert latents.shape == (2, 3, 2, 2, 48)
    assert torch.equal(to_uint8(codec.decode(latents)), frames)
    frames[0, 0, 0, 7] = 255 - frames[0, 0, 0, 7]
    changed = (codec.encode(frames) != latents).any(dim=-1)[0, 0]
    assert changed.tolist() == [[False, True], [False, False]]


def test_the_normaliser_takes_q01_to_minus_one_and_spares_channels_that_rest() -> None:
    normalizer = Normalizer(2, 1)
    ramp = torch.linspace(-3.0, 5.0, 101)
    normalizer.fit(torch.stack([ramp, torch.full((101,), 0.2)], dim=1), ramp[:, None])
    unit = normalizer.normalize_action(torch.tensor([[-2.92, 0.2], [4.92, 0.2]]))
    torch.testing.assert_close(unit, torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
    assert normalizer.action_half[1] == pytest.approx(MIN_HALF_RANGE)
    torch.testing.assert_close(normalizer.denormalize_action(unit), torch.tensor([[-2.92, 0.2], [4.92, 0.2]]))


def test_world_noise_is_a_function_of_each_seed_alone(policy: WAM) -> None:
    noise = policy.world_noise([3, 9, 3])
    assert torch.equal(noise[0], noise[2]) and not torch.equal(noise[0], noise[1])
    assert torch.equal(policy.world_noise([9])[0], noise[1])


def test_a_predicted_residual_converts_to_the_velocity_that_leads_to_the_sample(policy: WAM) -> None:
    obs, _, _ = observations(policy, 2)
    torch.nn.init.normal_(policy.world.proj_out.weight)
    noisy, sigma = torch.randn(policy.world_noise([0, 1]).shape), torch.tensor([1.0, 0.5])
    with torch.no_grad():
        velocity = policy.world_forward(obs, noisy, sigma).velocity
        policy.world.sizes = replace(policy.world.sizes, prediction="velocity")
        residual = policy.world_forward(obs, noisy, sigma).velocity
    reached = noisy - sigma.reshape(-1, 1, 1, 1, 1, 1) * velocity
    torch.testing.assert_close(reached - obs.memory[:, :, -1:], residual, rtol=1e-4, atol=1e-5)


def test_an_untrained_world_imagines_that_nothing_moves(policy: WAM) -> None:
    obs, frames, _ = observations(policy, 2)
    imagined = policy.imagine(obs, [0, 1], steps=4)
    still = (frames[:, -1:] / 255.0).expand_as(imagined)
    torch.testing.assert_close(imagined, still, rtol=0, atol=1e-5)


@torch.no_grad()
def test_blocks_attend_across_views_only_where_they_should() -> None:
    policy = WAM(TWO_VIEWS, seed=0)
    frames = torch.randint(0, 256, (1, 2, 2, 32, 32, 3), dtype=torch.uint8)
    other = frames.clone()
    other[:, :, 1] = 255 - other[:, :, 1]
    first, second = (policy.world_context(policy.encode(f, ["go"]), [0]).features for f in (frames, other))
    per_view = first[0].shape[1] // 2
    same_agent = [torch.equal(a[:, :per_view], b[:, :per_view]) for a, b in zip(first, second, strict=True)]
    assert same_agent == [False] * 4, "block 0 mixes the views, so every later block of the agent view changes"
    policy.world.transformer_blocks[0].attn1.to_v.weight.zero_()
    policy.world.transformer_blocks[0].attn1.to_v.bias.zero_()
    first, second = (policy.world_context(policy.encode(f, ["go"]), [0]).features for f in (frames, other))
    same_agent = [torch.equal(a[:, :per_view], b[:, :per_view]) for a, b in zip(first, second, strict=True)]
    assert same_agent == [True, True, True, False], "blocks 1 and 2 stay within a view, block 3 mixes again"


def test_the_language_and_the_state_move_the_action(policy: WAM) -> None:
    _, frames, state = observations(policy, 1)
    seeds = {"action_seed": 0, "world_seed": 0, "stochastic": False}
    one = policy.decide(frames[0].numpy(), state[0].numpy(), "go to the red disc", **seeds)
    two = policy.decide(frames[0].numpy(), state[0].numpy(), "go to the blue disc", **seeds)
    three = policy.decide(frames[0].numpy(), state[0].numpy() + 1.0, "go to the red disc", **seeds)
    assert not np.array_equal(one.actions, two.actions) and not np.array_equal(one.actions, three.actions)


def test_parameter_names_are_those_of_ltx_and_genie_envisioner() -> None:
    policy = WAM(replace(WAMConfig.debug(), world=WorldConfig(layers=2, heads=2, head_dim=16, learned_positions=False)))
    stock = LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        num_layers=2, caption_channels=8,
    )  # fmt: skip
    extra = {"view_embed", "view_ada.1.weight", "view_ada.1.bias"}
    assert set(policy.world.state_dict()) == set(stock.state_dict()) | extra
    assert all(name.startswith("action_") for name in policy.expert.state_dict())
    heads = {name.split(".")[0] for name in policy.expert.state_dict()}
    assert heads == {
        "action_proj_in", "action_time_embed", "action_scale_shift_table", "action_blocks", "action_proj_out",
    }  # fmt: skip


def test_pooled_features_are_the_memory_tokens_of_the_last_block() -> None:
    policy = WAM(TWO_VIEWS, seed=0)
    tokens = torch.arange(2 * 4 * 16, dtype=torch.float32).reshape(1, 2 * 4 * 16, 1).expand(-1, -1, 32)
    context: Context = policy.context_of((tokens,))
    assert context.pooled.shape == (1, policy.pooled_dim)
    assert context.pooled[0, 0] == np.arange(32).mean() and context.pooled[0, 32] == np.arange(64, 96).mean()


def test_frames_of_another_size_are_refused(policy: WAM) -> None:
    with pytest.raises(ValueError, match=r"\(1, 1, 16, 16, 3\).*\(1, 1, 32, 32, 3\)"):
        policy.encode(torch.zeros(2, 1, 1, 16, 16, 3, dtype=torch.uint8), ["go"] * 2)


def test_a_base_with_a_nan_is_refused_by_the_file_it_stands_in(policy: WAM, tmp_path: Path) -> None:
    with torch.no_grad():
        policy.expert.action_proj_out.bias[0] = float("nan")
    save_base(policy, tmp_path)
    with pytest.raises(ValueError, match=r"weights\.safetensors: expert\.action_proj_out\.bias is not finite"):
        load_base(tmp_path)
