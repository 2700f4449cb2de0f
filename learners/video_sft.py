"""World-model learner: supervised fine-tuning on successful rollouts, anchored to the pretrained world's features.

The training loop feeds it successful episodes; it exports world snapshots to the broker, which asks it how far a world
has drifted from the one the current actor was trained against.

    loss = flow-matching MSE on the executed future's latents
           + kl_weight x Gaussian KL of the features the expert reads, against the frozen pretrained world (DESIGN 6)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from learners.batching import Pick, decisions_with_future, gather
from learners.losses import feature_kl, feature_variance, flow_matching_mse
from learners.optim import GuardedAdamW, to_cpu
from wamrl_ray.types import Episode, Metrics, Snapshot, finite, seed_sequence

if TYPE_CHECKING:
    from wamrl_ray.policy.wam import WAM


@dataclass(frozen=True, kw_only=True)
class VideoSFTConfig:
    """How the world model is fine-tuned.  The paper (arXiv 2606.17906) gives the loss and none of these numbers."""

    kind: Literal["video_sft"] = "video_sft"
    lr: float = 2e-5
    "AdamW; a tenth of a usual pretraining rate, because the base already predicts well; 0 trains nothing"
    weight_decay: float = 0.0
    "none: the feature KL is the anchor, and at lr = 0 nothing may move"
    batch_size: int = 16
    "windows (decision, its imagined future) per gradient step"
    steps_per_update: int = 8
    "gradient steps per update: one pass over some ten successful LIBERO-Object episodes of 14 decisions"
    kl_weight: float = 0.1
    "lambda_KL; the KL is a mean per feature in nats, so 0.1 makes a drift of one reference std (0.5 nat) cost 0.05, "
    "of the order of the flow-matching loss of a trained base"
    ema_decay: float = 0.99
    "of the current features' variance s^2: a memory of some 100 batches"
    grad_clip: float = 1.0
    "largest global gradient norm, as in pretraining"
    sigma_one_share: float = 0.5
    "share of each batch trained at sigma = 1, the only noise level whose features the action expert reads; the KL is "
    "taken on these rows, of which there is always one"
    sigma_min: float = 0.2
    "the other rows are uniform in [sigma_min, 1]; an imagination in 4 steps visits nothing below 0.25"
    replay: float = 0.5
    "share of windows drawn from earlier stored successes, the rest from this iteration's; read by whoever picks the "
    "episodes (the training loop), so that few new successes do not wash out the old ones"
    max_bad_updates: int = 5
    "non-finite losses or gradients in a row after which the learner gives up with an error"
    probe_windows: int = 8
    "size of the fixed batch on which drift between world versions is measured"
    probe_versions: int = 6
    "worlds whose probe features are remembered, the longest unused is forgotten; more than the broker's keep_pairs"

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "kl_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"video_learner.{name} = {getattr(self, name)}: use 0 or a positive number")
        for name in ("batch_size", "steps_per_update", "max_bad_updates", "probe_windows", "probe_versions"):
            if getattr(self, name) < 1:
                raise ValueError(f"video_learner.{name} = {getattr(self, name)}: use at least 1")
        for name in ("sigma_one_share", "sigma_min", "replay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"video_learner.{name} = {getattr(self, name)}: use a share between 0 and 1")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"video_learner.ema_decay = {self.ema_decay}: use a number in [0, 1)")
        if not self.grad_clip > 0:
            raise ValueError(f"video_learner.grad_clip = {self.grad_clip}: use a positive norm")


class VideoSFTLearner:
    """Trains `policy.world`; implements `types.Learner`.

    `policy` is this learner's own copy, its expert stays as it is.  `reference` holds the frozen pretrained world and
    is never written to.  The first episodes seen fix reference variances and probe batch, which `state` keeps.
    """

    def __init__(
        self, config: VideoSFTConfig, policy: WAM, reference: WAM, *, run_seed: int, device: torch.device | str = "cpu"
    ) -> None:
        self.config, self.run_seed = config, run_seed
        self.policy = policy.to(device).eval().requires_grad_(False)
        self.reference = reference.to(device).eval().requires_grad_(False)
        for wam in (policy, reference):
            wam.text.forget()  # embeddings cached on another device
        self.reference_digest = reference.export("world").digest
        policy.world.requires_grad_(True)
        self.optimizer = GuardedAdamW(
            policy.world.parameters(), name="video_learner", lr=config.lr, weight_decay=config.weight_decay,
            grad_clip=config.grad_clip, max_bad=config.max_bad_updates,
        )  # fmt: skip
        self.variance: list[Tensor] = []
        "s^2 per layer (width,), an EMA; starts at the reference's"
        self.reference_variance: list[Tensor] = []
        self.probe_batch: dict[str, Any] | None = None
        "memory (P, M, V, h, w, 3) uint8, instruction (P strings), world_seed (P,)"
        self.probe_features: dict[str, list[Tensor]] = {}
        "digest of a world -> its features on the probe batch, oldest first"

    # ---------------------------------------------------------------------------------------- training

    def update(self, episodes: Sequence[Episode], *, index: int) -> Metrics:
        """`steps_per_update` gradient steps on windows of these successful episodes.

        A window is a decision and its future frames that exist.  Without any the weights stay and `video/steps_count`
        is 0.  Raises ValueError on an episode without success, RuntimeError when gradients stay non-finite.
        """
        failed = [episode.ticket.ticket_id for episode in episodes if not episode.success]
        if failed:
            raise ValueError(f"episodes with ticket ids {failed[:5]} did not succeed: train video on successes")
        windows = decisions_with_future(episodes, self.policy.spec)
        counts = [("video/episodes_count", len(episodes)), ("video/windows_count", len(windows))]
        if not windows:
            return finite([*counts, ("video/steps_count", 0), ("video/skipped_count", self.optimizer.skipped)])
        self.probe(episodes)
        rng = np.random.default_rng(seed_sequence(self.run_seed, index, "learner"))
        total = self.config.steps_per_update * self.config.batch_size
        rounds = [rng.permutation(len(windows)) for _ in range(-(-total // len(windows)))]
        order = np.concatenate(rounds)[:total].reshape(self.config.steps_per_update, -1)
        rows: list[dict[str, float]] = []
        for picks in order:
            terms = self.loss_terms(episodes, [windows[i] for i in picks], rng)
            loss = terms["flow_loss"] + self.config.kl_weight * terms["feature_kl_nats"]
            norm = self.optimizer.step(loss)
            if norm >= 0:
                rows.append({name: float(term.detach()) for name, term in terms.items()} | {"grad_norm": norm})
        means = [(f"video/{name}", float(np.mean([row[name] for row in rows]))) for name in (rows[0] if rows else ())]
        counts += [("video/steps_count", len(rows)), ("video/skipped_count", self.optimizer.skipped)]
        return finite([*counts, *means])

    def loss_terms(
        self, episodes: Sequence[Episode], picks: Sequence[Pick], rng: np.random.Generator
    ) -> dict[str, Tensor]:
        """`flow_loss` and `feature_kl_nats` of one batch, with gradient to `policy.world`; moves the variance EMA."""
        batch = gather(episodes, picks, self.policy.spec)
        obs = self.policy.encode(batch.memory, batch.instruction)
        clean = self.policy.encode_future(batch.future)
        noise = self.policy.world_noise(rng.integers(2**62, size=len(batch)).tolist())
        first = max(round(self.config.sigma_one_share * len(batch)), 1)
        drawn = rng.uniform(self.config.sigma_min, 1.0, size=len(batch)).astype(np.float32)
        sigma = torch.from_numpy(drawn).to(noise.device)
        sigma[:first] = 1.0
        level = sigma.reshape(-1, *[1] * (clean.dim() - 1))
        noisy = (1.0 - level) * clean + level * noise
        out = self.policy.world_forward(obs, noisy, sigma)
        with torch.no_grad():
            reference = self.reference.world_forward(obs.index(slice(first)), noisy[:first], sigma[:first]).features
        features = [layer[:first] for layer in out.features]
        decay = self.config.ema_decay
        moved = zip(self.variance, feature_variance(features), strict=True)
        variance = [decay * old + (1.0 - decay) * new for old, new in moved]
        if all(bool(torch.isfinite(layer).all()) for layer in variance):
            self.variance = variance
        return {
            "flow_loss": flow_matching_mse(
                out.velocity, noise, clean, batch.seen.to(noise.device), weight=self.policy.flow_weight(sigma)
            ),
            "feature_kl_nats": feature_kl(features, reference, self.variance, self.reference_variance),
        }

    # ---------------------------------------------------------------------------------------- drift

    def probe(self, episodes: Sequence[Episode]) -> None:
        """Fix the probe batch and the reference variances from these episodes.  The first call counts, later ones do
        nothing.  Raises ValueError if there is no decision."""
        if self.probe_batch is not None:
            return
        windows = decisions_with_future(episodes, self.policy.spec)
        rng = np.random.default_rng(seed_sequence(self.run_seed, 0, "schedule"))
        chosen = rng.permutation(len(windows))[: self.config.probe_windows]
        batch = gather(episodes, [windows[i] for i in chosen], self.policy.spec)
        seeds = torch.from_numpy(rng.integers(2**62, size=len(batch)))
        self.probe_batch = {"memory": batch.memory, "instruction": list(batch.instruction), "world_seed": seeds}
        self.reference_variance = feature_variance(self._features(self.reference))
        self.variance = [layer.clone() for layer in self.reference_variance]
        self._remember(self.policy.export("world").digest)

    def drift_from(self, digest: str) -> float:
        """Mean feature KL(current world || world `digest`) on the probe batch, nats per feature; 0 for the same digest.

        Both variances are the probe batch's own.  Raises ValueError if `digest` is not among the remembered versions.
        """
        if self.policy.export("world").digest == digest:
            return 0.0
        if digest not in self.probe_features:
            known = ", ".join(self.probe_features) or "none"
            raise ValueError(f"digest = {digest!r}: no remembered world ({known}); raise video_learner.probe_versions")
        self.probe_features[digest] = self.probe_features.pop(digest)  # asked for: forgotten last
        now, then = self._features(self.policy), [layer.to(self.policy.device) for layer in self.probe_features[digest]]
        return float(feature_kl(now, then, feature_variance(now), feature_variance(then)))

    @torch.no_grad()
    def _features(self, wam: WAM) -> list[Tensor]:
        assert self.probe_batch is not None
        obs = wam.encode(self.probe_batch["memory"], self.probe_batch["instruction"])
        return list(wam.world_context(obs, self.probe_batch["world_seed"]).features)

    def _remember(self, digest: str) -> None:
        if self.probe_batch is None:
            return
        self.probe_features.pop(digest, None)
        self.probe_features[digest] = [layer.cpu() for layer in self._features(self.policy)]
        while len(self.probe_features) > self.config.probe_versions:
            del self.probe_features[next(iter(self.probe_features))]

    # ---------------------------------------------------------------------------------------- weights and state

    def export(self) -> Snapshot:
        """The current world, and a note of its probe features for `drift_from`."""
        snapshot = self.policy.export("world")
        self._remember(snapshot.digest)
        return snapshot

    def state(self) -> dict[str, Any]:
        """Plain nested dicts, lists, numbers and CPU tensors."""
        return {
            "kind": self.config.kind,
            "interface": self.policy.interface_digest,
            "reference": self.reference_digest,
            "world": to_cpu(self.policy.world.state_dict()),
            "optimizer": self.optimizer.state(),
            "variance": to_cpu(self.variance),
            "reference_variance": to_cpu(self.reference_variance),
            "probe_batch": to_cpu(self.probe_batch),
            "probe_features": to_cpu(self.probe_features),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if the state was made by another kind of learner or against another base."""
        here = {"kind": self.config.kind, "interface": self.policy.interface_digest, "reference": self.reference_digest}
        for name, own in here.items():
            if state[name] != own:
                raise ValueError(
                    f"video learner state has {name} = {state[name]!r}, this run {own!r}: resume with the saved config"
                )
        device = self.policy.device
        self.policy.world.load_state_dict(state["world"])
        self.optimizer.load_state(state["optimizer"])
        self.variance = [layer.to(device) for layer in to_cpu(state["variance"])]
        self.reference_variance = [layer.to(device) for layer in to_cpu(state["reference_variance"])]
        self.probe_batch = to_cpu(state["probe_batch"])
        self.probe_features = to_cpu(state["probe_features"])
