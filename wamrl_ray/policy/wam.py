"""The world-action model: codec, text encoder, world model, action expert and normaliser behind one contract.

rollout calls `decide`; learners call `encode`, `world_forward`, `world_context`, `velocity`, `imagine`; the broker
moves what `export` makes and `load_pair` takes.  The world half and the actor half are trained, the rest is frozen and
named by `interface_digest`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from wamrl_ray.policy import flow_sde
from wamrl_ray.policy.action_expert import ActionExpert, ExpertConfig, KeysValues
from wamrl_ray.policy.codec import PatchCodec
from wamrl_ray.policy.flow_sde import SamplerConfig
from wamrl_ray.policy.normalizer import Normalizer
from wamrl_ray.policy.text import TextEncoder
from wamrl_ray.policy.weights import from_snapshot, load_strict, to_snapshot
from wamrl_ray.policy.world_model import WorldConfig, WorldModel, WorldOutput
from wamrl_ray.types import Decision, PolicySpec, Snapshot


@dataclass(frozen=True, kw_only=True)
class WAMConfig:
    """Architecture of a policy; stored beside its weights.  The defaults are the tiny LIBERO preset."""

    horizon: int = 8
    executed: int = 8
    action_dim: int = 7
    state_dim: int = 8
    views: tuple[str, ...] = ("agent", "wrist")
    resolution: int = 64
    memory: int = 1
    imagined_offsets: tuple[int, ...] = (8,)
    patch: int = 16
    text_width: int = 64
    text_layers: int = 2
    text_length: int = 64
    world: WorldConfig = field(default_factory=WorldConfig)
    expert: ExpertConfig = field(default_factory=ExpertConfig)

    def __post_init__(self) -> None:
        if self.resolution % self.patch:
            raise ValueError(f"policy.resolution = {self.resolution}: use a multiple of patch = {self.patch}")
        if not 1 <= self.executed <= self.horizon:
            raise ValueError(f"policy.executed = {self.executed}: use 1..horizon = {self.horizon}")
        offsets = self.imagined_offsets
        if not offsets or list(offsets) != sorted(set(offsets)) or not 1 <= offsets[0] <= offsets[-1] <= self.horizon:
            raise ValueError(f"policy.imagined_offsets = {offsets}: use ascending steps in 1..{self.horizon}")

    @classmethod
    def debug(cls) -> Self:
        """A network of some 100,000 parameters with the sizes of `reach`: for tests and `configs/debug.yaml`."""
        return cls(
            horizon=4, executed=4, action_dim=2, state_dim=2, views=("top",), resolution=32, imagined_offsets=(2, 4),
            patch=8, text_width=16, text_layers=1, text_length=32,
            world=WorldConfig(layers=2, heads=2, head_dim=16), expert=ExpertConfig(heads=2, head_dim=16),
        )  # fmt: skip

    @property
    def grid(self) -> int:
        return self.resolution // self.patch

    @property
    def spec(self) -> PolicySpec:
        return PolicySpec(
            horizon=self.horizon,
            executed=self.executed,
            action_dim=self.action_dim,
            state_dim=self.state_dim,
            channels=self.action_dim + self.state_dim,
            views=self.views,
            resolution=self.resolution,
            memory=self.memory,
            imagined_offsets=self.imagined_offsets,
        )


@dataclass(frozen=True, kw_only=True)
class ObsLatents:
    """What the frozen front end makes of observations: small, and all that acting depends on beside state and seeds."""

    memory: Tensor
    "(B, V, M, gh, gw, C)"
    text: Tensor
    "(B, L, text width)"
    text_mask: Tensor
    "(B, L), 1 on real tokens"

    def index(self, which: Tensor | slice) -> ObsLatents:
        return ObsLatents(memory=self.memory[which], text=self.text[which], text_mask=self.text_mask[which])


@dataclass(frozen=True, kw_only=True)
class Context:
    """The world model's view of a decision: features at sigma = 1, ready for the expert."""

    features: tuple[Tensor, ...]
    "per block (B, V*N, width)"
    pooled: Tensor
    "(B, V * width): last block's memory tokens, averaged per view; the critic's input"
    keys_values: KeysValues | None = None

    def index(self, which: Tensor | slice) -> Context:
        return Context(features=tuple(f[which] for f in self.features), pooled=self.pooled[which])


class WAM(nn.Module):
    """A world-action policy.  Batched methods are differentiable; `decide` and `imagine` are not."""

    def __init__(self, config: WAMConfig, sampler: SamplerConfig | None = None, *, seed: int = 0) -> None:
        super().__init__()
        self.config, self.spec = config, config.spec
        self.sampler = sampler or SamplerConfig()
        self.codec = PatchCodec(patch=config.patch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.text = TextEncoder(config.text_width, config.text_layers, config.text_length)
            self.world = WorldModel(
                config.world,
                channels=self.codec.channels,
                text_width=config.text_width,
                tokens_per_frame=config.grid**2,
                views=len(config.views),
            )
            self.expert = ActionExpert(
                config.expert,
                channels=self.spec.channels,
                feature_width=config.world.width,
                layers=config.world.layers,
            )
        self.normalizer = Normalizer(config.action_dim, config.state_dim)

    # ---------------------------------------------------------------------------------------- world

    @property
    def device(self) -> torch.device:
        return self.world.view_embed.device

    @property
    def pooled_dim(self) -> int:
        return len(self.config.views) * self.config.world.width

    def encode(self, frames: Tensor, instructions: Sequence[str]) -> ObsLatents:
        """Memory frames uint8 (B, M, V, h, w, 3), oldest first, and B instructions -> latents.  No gradient."""
        expected = (self.spec.memory, len(self.spec.views), self.spec.resolution, self.spec.resolution, 3)
        if tuple(frames.shape[1:]) != expected:
            raise ValueError(f"frames have shape {tuple(frames.shape[1:])} per sample, the policy expects {expected}")
        text, mask = zip(*(self.text(instruction) for instruction in instructions), strict=True)
        memory = self.codec.encode(frames.to(self.device)).transpose(1, 2)
        return ObsLatents(memory=memory, text=torch.stack(text), text_mask=torch.stack(mask))

    def encode_future(self, frames: Tensor) -> Tensor:
        """Future frames uint8 (B, F, V, h, w, 3) -> latents (B, V, F, gh, gw, C)."""
        return self.codec.encode(frames.to(self.device)).transpose(1, 2)

    def world_noise(self, world_seed: Tensor | Sequence[int]) -> Tensor:
        """The future at sigma = 1, (B, V, F, gh, gw, C): a function of each sample's seed alone, on every device."""
        c, g = self.config, self.config.grid
        shape = (len(c.views), len(c.imagined_offsets), g, g, self.codec.channels)
        noise = [torch.randn(shape, generator=torch.Generator().manual_seed(int(seed))) for seed in world_seed]
        return torch.stack(noise).to(self.device)

    def world_forward(self, obs: ObsLatents, future: Tensor, sigma: Tensor) -> WorldOutput:
        """One pass of the video DiT over clean memory and the noisy future at sigma (B,)."""
        out: WorldOutput = self.world(obs.memory, future, sigma, obs.text, obs.text_mask)
        return out

    def flow_weight(self, sigma: Tensor) -> Tensor:
        """(B,) weight of the squared velocity error: sigma^2 for a network that predicts the residual, else 1.

        It makes the loss the plain mean squared error of what the network predicts; unweighted, a predicted residual's
        error is divided by sigma^2 and the nearly clean levels drown the rest.
        """
        return sigma.square() if self.config.world.prediction == "residual" else torch.ones_like(sigma)

    def context_of(self, features: tuple[Tensor, ...]) -> Context:
        """Wrap the features of a pass at sigma = 1."""
        views, last = len(self.config.views), features[-1]
        memory_tokens = self.config.memory * self.config.grid**2
        per_view = last.reshape(len(last), views, -1, last.shape[-1])
        return Context(features=features, pooled=per_view[:, :, :memory_tokens].mean(dim=2).flatten(1))

    def world_context(self, obs: ObsLatents, world_seed: Tensor | Sequence[int]) -> Context:
        """Features of one pass with the future at pure noise: all the action expert ever sees of the world."""
        noise = self.world_noise(world_seed)
        return self.context_of(self.world_forward(obs, noise, torch.ones(len(noise), device=self.device)).features)

    @torch.no_grad()
    def imagine(self, obs: ObsLatents, world_seed: Tensor | Sequence[int], steps: int) -> Tensor:
        """Denoise the future from the noise that acting used: float32 (B, F, V, h, w, 3) in [0, 1]."""
        x = self.world_noise(world_seed)
        grid = flow_sde.sigma_grid(steps)
        for sigma, sigma_next in zip(grid[:-1], grid[1:], strict=True):
            at = torch.full((len(x),), sigma, device=self.device)
            x = x + (sigma_next - sigma) * self.world_forward(obs, x, at).velocity
        return self.codec.decode(x.transpose(1, 2))

    def round_trip(self, frames: Tensor) -> Tensor:
        """Executed frames uint8 as the codec would show them, float32 in [0, 1]: compare like with like."""
        return self.codec.round_trip(frames)

    # ---------------------------------------------------------------------------------------- actor

    def velocity(self, context: Context, x: Tensor, sigma: Tensor, state: Tensor) -> Tensor:
        """Action velocity (B, H, D) at x (B, H, D), sigma (B,), current state (B, S) in env units."""
        keys_values = context.keys_values or self.expert.keys_values(context.features)
        normal = self.normalizer.normalize_state(state)
        token = torch.cat([normal.new_zeros(len(normal), self.spec.action_dim), normal], dim=1)
        out: Tensor = self.expert(keys_values, x, sigma, token)
        return out

    def executed_mask(self) -> Tensor:
        """(H, D): 1 on executed steps x env action dimensions, the entries whose density is counted."""
        mask = torch.zeros(self.spec.horizon, self.spec.channels, device=self.device)
        mask[: self.spec.executed, : self.spec.action_dim] = 1.0
        return mask

    @torch.inference_mode()
    def decide(
        self,
        frames: NDArray[np.uint8],
        state: NDArray[np.float32],
        instruction: str,
        *,
        action_seed: int,
        world_seed: int,
        stochastic: bool,
    ) -> Decision:
        """Act on memory frames (M, V, h, w, 3) and state (S,).  One observation, one fixed shape: so the bits of an
        action do not depend on what else is being decided."""
        obs = self.encode(torch.from_numpy(np.ascontiguousarray(frames))[None], [instruction])
        context = self.world_context(obs, [world_seed])
        context = replace(context, keys_values=self.expert.keys_values(context.features))
        state_in = torch.from_numpy(np.array(state, dtype=np.float32))[None].to(self.device)

        generator = torch.Generator().manual_seed(action_seed)
        x = torch.randn((1, self.spec.horizon, self.spec.channels), generator=generator).to(self.device)
        chosen = flow_sde.draw_stochastic_step(generator, self.sampler) if stochastic else -1
        mask, steps, eta = self.executed_mask(), self.sampler.num_steps, self.sampler.eta
        chain, logprob = [x], torch.zeros(1, device=self.device)
        for k, sigma in enumerate(flow_sde.sigma_grid(steps)[:-1]):
            v = self.velocity(context, x, torch.full((1,), sigma, device=self.device), state_in)
            x_next = flow_sde.transition_mean(x, v, k, steps, 0.0)
            if eta > 0 and flow_sde.is_stochastic(chosen, k, self.sampler):
                mean, std = flow_sde.transition_mean(x, v, k, steps, eta), flow_sde.transition_std(k, steps, eta)
                noise = torch.randn(x.shape, generator=generator).to(self.device)
                x_next = torch.where(mask > 0, mean + std * noise, x_next)
                logprob = logprob + flow_sde.gaussian_log_prob(x_next, mean, std, mask)
            x = x_next
            chain.append(x)
        actions = self.normalizer.denormalize_action(x[0, : self.spec.executed, : self.spec.action_dim])
        return Decision(
            actions=actions.cpu().numpy(),
            chain=torch.cat(chain).cpu().numpy(),
            stochastic_step=chosen,
            logprob=float(logprob),
            world_seed=world_seed,
        )

    # ---------------------------------------------------------------------------------------- weights

    @property
    def interface_digest(self) -> str:
        """What both halves must agree on: architecture, codec, text encoder and normaliser (16 hex digits)."""
        digest = hashlib.sha256(json.dumps(asdict(self.config), sort_keys=True).encode())
        for part in (self.normalizer, self.text):
            for name, tensor in sorted(part.state_dict().items()):
                digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def component(self, name: Literal["world", "actor"]) -> nn.Module:
        return {"world": self.world, "actor": self.expert}[name]

    def export(self, name: Literal["world", "actor"]) -> Snapshot:
        return to_snapshot(name, self.component(name).state_dict())

    def load_component(self, snapshot: Snapshot) -> None:
        """Raises ValueError, and changes nothing, if digest, names or shapes do not match."""
        load_strict(self.component(snapshot.component), from_snapshot(snapshot), snapshot.component)

    def load_pair(self, world: Snapshot, actor: Snapshot) -> None:
        """Both or neither: verified into shadow copies first, then swapped in."""
        shadows = {s.component: from_snapshot(s) for s in (world, actor)}
        if shadows.keys() != {"world", "actor"}:
            raise ValueError(f"load_pair got {world.component!r}, {actor.component!r}: pass a world, then an actor")
        before = {name: tensor.clone() for name, tensor in self.world.state_dict().items()}
        try:
            load_strict(self.world, shadows["world"], "world")
            load_strict(self.expert, shadows["actor"], "actor")
        except ValueError:
            self.world.load_state_dict(before)
            raise
