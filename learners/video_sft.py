"""World-model learner: supervised fine-tuning on rollouts, anchored to the pretrained world's features.

The training loop feeds it episodes; it exports world snapshots to the broker, which asks it how far a world has drifted
from the one the current actor was trained against.

    successes ─┐                          loss = flow-matching MSE on the executed future's latents
    failures ──┼─ draw ─► VideoBatch ──►         + lambda_KL x KL of the features the expert reads, against the frozen
    demos ─────┘   ▲                                            pretrained world
                   └ held-out starts never get here: their prediction error is measured before and after

KL (docs/learners.md, section 9): mean over layers, tokens and channels, between two Gaussians of diagonal covariance:

    1/2 [log(s_ref^2 / s^2) + (s^2 + (mu - mu_ref)^2) / s_ref^2 - 1]

mu, mu_ref   features of the current and of the pretrained world on the same windows and noise, at sigma = 1, per layer
s_ref^2      per layer and channel, once, from the pretrained world on the first episodes: the mean over
             `calibration_batches` batches of the variance over a batch's rows and tokens
s^2          the same of the current world, an EMA over training batches (`ema_decay`), starting at s_ref^2
gradient     flows through mu alone; s^2 and s_ref^2 are statistics, so at mu = mu_ref it is exactly zero

lambda_KL is constant, or adapted after each update to the drift from the pretrained world on a fixed probe batch
(`video_anchor.adapted_weight`).  Failed episodes: see `video_config`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from learners.batching import Pick, decisions_with_future
from learners.losses import flow_matching_mse
from learners.optim import GuardedAdamW, to_cpu
from learners.video_anchor import FeatureAnchor, adapted_weight
from learners.video_batch import VideoBatch, join, of_episodes, of_windows
from learners.video_config import VideoSFTConfig
from learners.video_held_out import HeldOutWindows
from learners.video_probe import DriftProbe
from learners.video_sampling import batch_parts, draw, is_held_out
from learners.windows import Windows
from wamrl_ray.types import Episode, Metrics, Snapshot, finite, seed_sequence

if TYPE_CHECKING:
    from wamrl_ray.policy.wam import WAM

__all__ = ["VideoSFTConfig", "VideoSFTLearner"]


class VideoSFTLearner:
    """Trains `policy.world`; implements `types.Learner`.

    `policy` is this learner's own copy, its expert stays as it is.  `reference` holds the frozen pretrained world and
    is never written to.  The first episodes seen fix reference variances and probe batch, which `state` keeps.
    """

    def __init__(
        self, config: VideoSFTConfig, policy: WAM, reference: WAM, *, run_seed: int,
        pretraining: Windows | None = None, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        """`pretraining`: what `config.pretraining.path` names.  Raises ValueError if only one of the two is given."""
        if (pretraining is None) != (config.pretraining.path == ""):
            raise ValueError(
                f"video_learner.pretraining.path = {config.pretraining.path!r}: "
                f"{'no' if pretraining is None else len(pretraining)} windows came with it; give both or neither"
            )
        self.config, self.run_seed, self.pretraining = config, run_seed, pretraining
        self.policy = policy.to(device).eval().requires_grad_(False)
        self.reference = reference.to(device).eval().requires_grad_(False)
        for wam in (policy, reference):
            wam.text.forget()  # embeddings cached on another device
        self.reference_digest = reference.export("world").digest
        policy.world.requires_grad_(True)
        self.failure_embed = nn.Parameter(torch.zeros(policy.config.world.width, device=policy.device))
        "what failure looks like beside success, which is the reference level; never part of a snapshot"
        self.optimizer = GuardedAdamW(
            [*policy.world.parameters(), self.failure_embed], name="video_learner", lr=config.lr,
            weight_decay=config.weight_decay, grad_clip=config.grad_clip, max_bad=config.max_bad_updates,
        )  # fmt: skip
        self.kl_weight = config.kl_weight
        self.anchor = FeatureAnchor(config.ema_decay)
        self.held_out = HeldOutWindows(config.held_out_windows)
        self._probe = DriftProbe(policy, config.probe_versions)
        self._drift = 0.0
        "from the pretrained world, as last measured"

    # ---------------------------------------------------------------------------------------- training

    def update(self, episodes: Sequence[Episode], *, index: int) -> Metrics:
        """`steps_per_update` gradient steps on windows of these episodes.

        A window is a decision and its future frames that exist.  Without one of a success, or with lr = 0, the weights
        stay and `video/steps_count` is 0.  Raises ValueError on a failed episode with `failures.kind` success_only,
        RuntimeError when gradients stay non-finite or features become it.
        """
        failed = [episode.ticket.ticket_id for episode in episodes if not episode.success]
        if failed and self.config.failures.share == 0:
            raise ValueError(f"episodes with ticket ids {failed[:5]} did not succeed: train video on successes")
        trained = [episode for episode in episodes if not self._is_held_out(episode)]
        self.held_out.add([e for e in episodes if e.success and self._is_held_out(e)], self.policy)
        windows = decisions_with_future(trained, self.policy.spec)
        successes = [pick for pick in windows if trained[pick[0]].success]
        counts = [
            ("video/episodes_count", len(trained)),
            ("video/windows_count", len(windows)),
            ("video/held_out_windows_count", len(self.held_out)),
        ]
        if not successes:
            return finite([*counts, ("video/steps_count", 0), ("video/skipped_count", self.optimizer.skipped)])
        self.probe([episode for episode in trained if episode.success])
        moved = [("video/drift_before_nats", self._drift), ("video/kl_weight", self.kl_weight)]
        errors = self._held_out_errors("before")
        rng = np.random.default_rng(seed_sequence(self.run_seed, index, "learner"))
        means = self._train(trained, windows, rng) if self.config.lr > 0 else [("video/steps_count", 0.0)]
        self._drift = self._probe.drift()
        if not math.isfinite(self._drift):
            raise RuntimeError(
                f"video_learner: the world's features are not finite any more (drift {self._drift}): lower "
                f"video_learner.lr = {self.config.lr} or resume from an earlier checkpoint"
            )
        moved += [("video/drift_nats", self._drift), *errors, *self._held_out_errors("after")]
        if self.config.kl_target > 0:
            self.kl_weight = adapted_weight(
                self.kl_weight, self._drift, self.config.kl_target, self.config.kl_weight_range
            )
        return finite([*counts, ("video/skipped_count", self.optimizer.skipped), *moved, *means])

    def loss_terms(self, batch: VideoBatch, rng: np.random.Generator) -> dict[str, Tensor]:
        """`flow_loss`, `feature_kl_nats` and the latter per layer, with gradient to `policy.world` and
        `failure_embed`; moves the variance EMA.  The first row must be a success: it always counts in the KL."""
        device, config = self.policy.device, self.config
        obs = self.policy.encode(batch.memory, batch.instruction)
        clean = self.policy.encode_future(batch.future)
        noise = self.policy.world_noise(rng.integers(2**62, size=len(batch)).tolist())
        sigma_np = rng.uniform(config.sigma_min, 1.0, size=len(batch)).astype(np.float32)
        at_one = np.concatenate([[0], 1 + rng.permutation(len(batch) - 1)])[: config.anchored_rows]
        sigma_np[at_one] = 1.0
        marked = batch.failed.numpy() & (config.failures.kind == "outcome_conditioned")
        # The expert never reads the features of a marked row, so nothing holds them where they were.
        anchored = torch.from_numpy(np.sort(at_one[~marked[at_one]])).to(device)
        sigma = torch.from_numpy(sigma_np).to(device)
        level = sigma.reshape(-1, *[1] * (clean.dim() - 1))
        noisy = (1.0 - level) * clean + level * noise
        # Without a marked row there is no gradient, and the optimiser leaves the vector as it is.
        outcome = torch.from_numpy(marked).to(device)[:, None] * self.failure_embed if marked.any() else None
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.precision == "bf16"):
            out = self.policy.world_forward(obs, noisy, sigma, outcome)
            with torch.no_grad():
                reference = self.reference.world_forward(obs.index(anchored), noisy[anchored], sigma[anchored]).features
        layers = self.anchor.kl([layer[anchored].float() for layer in out.features], [f.float() for f in reference])
        weight = self.policy.flow_weight(sigma)
        flow_loss = flow_matching_mse(out.velocity.float(), noise, clean, batch.seen.to(device), weight=weight)
        per_layer = {f"feature_kl_layer{i}_nats": layer for i, layer in enumerate(layers)}
        return {"flow_loss": flow_loss, "feature_kl_nats": torch.stack(layers).mean(), **per_layer}

    def _train(
        self, episodes: Sequence[Episode], windows: Sequence[Pick], rng: np.random.Generator
    ) -> list[tuple[str, float]]:
        """The gradient steps; -> means of their terms, and what they were made on."""
        rows: list[dict[str, float]] = []
        for batch in self._batches(episodes, windows, rng):
            terms = self.loss_terms(batch, rng)
            norm = self.optimizer.step(terms["flow_loss"] + self.kl_weight * terms["feature_kl_nats"])
            if norm >= 0:
                values = {name: float(term.detach()) for name, term in terms.items()}
                rows.append(values | {"grad_norm": norm} | batch.shares())
        means = [(f"video/{name}", float(np.mean([row[name] for row in rows]))) for name in (rows[0] if rows else ())]
        if self.config.failures.kind == "outcome_conditioned":
            means.append(("video/failure_embed_norm", float(self.failure_embed.detach().norm())))
        return [*means, ("video/steps_count", len(rows))]

    def _batches(
        self, episodes: Sequence[Episode], windows: Sequence[Pick], rng: np.random.Generator
    ) -> Iterator[VideoBatch]:
        """`steps_per_update` batches, successes first, then failures, then demonstrations; drawn before the first."""
        config, pretraining = self.config, self.pretraining
        successes = [pick for pick in windows if episodes[pick[0]].success]
        failures = [pick for pick in windows if not episodes[pick[0]].success]
        sizes = batch_parts(
            config.batch_size,
            failed=config.failures.share if failures else 0.0,
            pretraining=0.0 if pretraining is None else config.pretraining.share,
        )
        totals = [size * config.steps_per_update for size in sizes]

        def chosen(picks: Sequence[Pick], total: int) -> list[Pick]:
            tasks = [episodes[e].ticket.task_id for e, _ in picks]
            return [picks[i] for i in draw(tasks, total, rng, balance=config.balance_tasks)]

        drawn = [chosen(successes, totals[0]), chosen(failures, totals[1])]
        instructions = () if pretraining is None else pretraining.instruction
        demonstrated = draw(instructions, totals[2], rng, balance=config.balance_tasks)
        for step in range(config.steps_per_update):
            spans = [slice(step * size, (step + 1) * size) for size in sizes]
            batch = of_episodes(episodes, drawn[0][spans[0]] + drawn[1][spans[1]], self.policy.spec)
            if pretraining is not None and sizes[2]:
                batch = join([batch, of_windows(pretraining, demonstrated[spans[2]])])
            yield batch

    # ---------------------------------------------------------------------------------------- drift, held-out error

    def probe(self, episodes: Sequence[Episode]) -> None:
        """Fix the probe batch and the reference variances from these episodes.  The first call counts, later ones do
        nothing.  Raises ValueError if there is no decision."""
        if self._probe.batch is not None:
            return
        windows = decisions_with_future(episodes, self.policy.spec)
        tasks = [episodes[e].ticket.task_id for e, _ in windows]
        rng = np.random.default_rng(seed_sequence(self.run_seed, 0, "schedule"))

        def batches(count: int, rows: int) -> list[tuple[VideoBatch, Tensor]]:
            order = draw(tasks, count * rows, rng, balance=self.config.balance_tasks).reshape(count, rows)
            seeds = torch.from_numpy(rng.integers(2**62, size=(count, rows)))
            chosen = [of_episodes(episodes, [windows[i] for i in row], self.policy.spec) for row in order]
            return list(zip(chosen, seeds, strict=True))

        (batch, seeds), = batches(1, min(self.config.probe_windows, len(windows)))
        self._probe.fix(batch, seeds, self.reference)
        with torch.no_grad():
            self.anchor.calibrate(
                self.reference.world_context(self.reference.encode(b.memory, b.instruction), s).features
                for b, s in batches(self.config.calibration_batches, self.config.anchored_rows)
            )
        self._drift = self._probe.drift()

    def drift_from(self, digest: str) -> float:
        """Mean feature KL(current world || world `digest`) on the probe batch; see `DriftProbe.drift_from`."""
        return self._probe.drift_from(digest)

    def _is_held_out(self, episode: Episode) -> bool:
        ticket = episode.ticket
        return is_held_out(self.run_seed, ticket.task_id, ticket.init_state_id, self.config.held_out_share)

    def _held_out_errors(self, when: str) -> list[tuple[str, float]]:
        if len(self.held_out) == 0:
            return []
        imagined, still = self.held_out.errors(self.policy)
        return [(f"video/held_out_error_{when}", imagined), ("video/still_error", still)]

    # ---------------------------------------------------------------------------------------- weights and state

    def export(self) -> Snapshot:
        """The current world, and a note of its probe features for `drift_from`."""
        snapshot = self.policy.export("world")
        self._probe.remember(snapshot.digest)
        return snapshot

    def state(self) -> dict[str, Any]:
        """Plain nested dicts, lists, numbers and CPU tensors."""
        return {
            "kind": self.config.kind,
            "interface": self.policy.interface_digest,
            "reference": self.reference_digest,
            "world": to_cpu(self.policy.world.state_dict()),
            "failure_embed": to_cpu(self.failure_embed),
            "optimizer": self.optimizer.state(),
            "kl_weight": self.kl_weight,
            "drift": self._drift,
            "anchor": self.anchor.state(),
            "probe": self._probe.state(),
            "held_out": self.held_out.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if the state was made by another kind of learner or against another base."""
        here = {"kind": self.config.kind, "interface": self.policy.interface_digest, "reference": self.reference_digest}
        for name, own in here.items():
            if state[name] != own:
                raise ValueError(
                    f"video learner state has {name} = {state[name]!r}, this run {own!r}: resume with the saved config"
                )
        self.policy.world.load_state_dict(state["world"])
        with torch.no_grad():
            self.failure_embed.copy_(state["failure_embed"])
        self.optimizer.load_state(state["optimizer"])
        self.kl_weight, self._drift = float(state["kl_weight"]), float(state["drift"])
        self.anchor.load_state(state["anchor"], self.policy.device)
        self._probe.load_state(state["probe"])
        self.held_out.load_state(state["held_out"])
