"""How far the video learner moves the features the expert reads: without the KL, with a large weight, with a target.

    python -m benchmarks.feature_drift --env reach|libero_object --json OUT [--episodes FOLDER] [--updates 20]

Every arm makes the same updates from the shipped base, on the same successful episodes that this base acted with its
exploration noise; they are made here, or read from a folder of `*.npz` files (`wamrl_ray.store.save_episode`).  Only
the weight differs.  For each arm: drift from the pretrained world in nats per feature after every update, the weight in
use, and the prediction error on starts that were never trained on, before the first update and after the last.
Beside them, how well the reference variance is estimated: the relative error of two estimates from separate windows,
from one batch of the probe's size and from the calibration's mean over batches.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from envs.build import make_env
from learners.batching import decisions_with_future
from learners.losses import feature_variance
from learners.video_batch import of_episodes
from learners.video_config import VideoSFTConfig
from learners.video_sft import VideoSFTLearner
from wamrl_ray.broker import WeightBroker
from wamrl_ray.commands_eval import check_writable
from wamrl_ray.config import BrokerConfig, RolloutConfig
from wamrl_ray.local import LocalPool
from wamrl_ray.policy.bases import load_base
from wamrl_ray.preflight import env_config
from wamrl_ray.store import load_episode
from wamrl_ray.tickets import TicketOffice
from wamrl_ray.types import Episode

LARGE, HELD_OUT = 100.0, 0.2
"""the large KL weight; the share of starts kept from training, twice the default because few succeed here"""
BASES = {"reach": "tiny_reach", "libero_object": "tiny_libero_object"}
SETTINGS: dict[str, dict[str, float]] = {
    "reach": {"lr": 5e-4, "kl_target": 0.02, "episodes": 160},
    "libero_object": {"lr": 2e-4, "kl_target": 0.02, "episodes": 80},
}
"""Learning rates at which the drift without a KL clearly passes the target within 20 updates."""
PER_UPDATE = 12
"""successful episodes an update is made on"""


def made_episodes(env: str, count: int, seed: int) -> list[Episode]:
    """Training episodes acted by the shipped base."""
    config = env_config(env)
    policy = load_base(BASES[env])
    with TemporaryDirectory() as folder:
        broker = WeightBroker(BrokerConfig(), Path(folder) / "epoch.json")
        pair = broker.begin(policy.export("world"), policy.export("actor"), interface=policy.interface_digest)
        pool = LocalPool(lambda split: make_env(config, split), policy, broker, 3)
        try:
            train = pool.env("train")
            rollout = RolloutConfig(episodes_per_iteration=count, group_size=1)
            tickets = TicketOffice(seed, train.env_spec, rollout, train.tasks).train_tickets(0)
            return [episode for _, episode in pool.run(tickets, pair)]
        finally:
            pool.close()


def run_arm(env: str, successes: list[Episode], updates: int, config: VideoSFTConfig, seed: int) -> dict[str, Any]:
    learner = VideoSFTLearner(config, load_base(BASES[env]), load_base(BASES[env]), run_seed=seed)
    rows = []
    for index in range(updates):
        start = index * PER_UPDATE
        chosen = [successes[i % len(successes)] for i in range(start, start + min(PER_UPDATE, len(successes)))]
        rows.append(learner.update(chosen, index=index))
    errors = [row for row in rows if "video/held_out_error_before" in row]
    return {
        "drift_nats": [0.0, *(row["video/drift_nats"] for row in rows if "video/drift_nats" in row)],
        "kl_weight": [row["video/kl_weight"] for row in rows if "video/kl_weight" in row],
        "kl_weight_after": learner.kl_weight,
        "held_out_windows": rows[-1]["video/held_out_windows_count"],
        # The windows stay the same once they are full, so the last figure of the base is the world's before training.
        "held_out_error_last": errors[-1]["video/held_out_error_after"] if errors else None,
        "held_out_error_base": _base_error(env, learner) if errors else None,
        "still_error": errors[-1]["video/still_error"] if errors else None,
        "flow_loss": [row["video/flow_loss"] for row in rows if "video/flow_loss" in row],
    }


def _base_error(env: str, learner: VideoSFTLearner) -> float:
    """The untrained world's error on the windows the arm ended with."""
    return learner.held_out.errors(load_base(BASES[env]))[0]


def variance_spread(env: str, successes: list[Episode], config: VideoSFTConfig) -> dict[str, float]:
    """Mean relative difference, over layers and channels, of two independent estimates of the reference variance."""
    policy = load_base(BASES[env])
    windows = decisions_with_future(successes, policy.spec)
    rng = np.random.default_rng(0)
    order = [windows[i] for i in rng.permutation(len(windows))]

    @torch.no_grad()
    def estimate(picks: list[tuple[int, int]], batches: int) -> list[torch.Tensor]:
        size = len(picks) // batches
        found = []
        for b in range(batches):
            batch = of_episodes(successes, picks[b * size : (b + 1) * size], policy.spec)
            seeds = rng.integers(2**62, size=len(batch)).tolist()
            obs = policy.encode(batch.memory, batch.instruction)
            found.append(feature_variance(policy.world_context(obs, seeds).features))
        return [torch.stack(layer).mean(dim=0) for layer in zip(*found, strict=True)]

    def spread(windows_each: int, batches: int) -> float:
        one, other = (estimate(order[i * windows_each : (i + 1) * windows_each], batches) for i in (0, 1))
        return float(np.mean([((a - b).abs() / (a + b) * 2).mean() for a, b in zip(one, other, strict=True)]))

    batches = min(config.calibration_batches, len(order) // (2 * config.anchored_rows))
    return {
        "probe": spread(config.probe_windows, 1),
        "calibration": spread(batches * config.anchored_rows, batches),
        "calibration_batches": float(batches),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=sorted(BASES), default="reach")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--episodes", type=Path, help="a folder of saved episodes, instead of making them")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--kl-target", type=float)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    check_writable(args.json)
    torch.set_num_threads(1)
    settings, started = SETTINGS[args.env], time.monotonic()
    lr, target = args.lr or settings["lr"], args.kl_target or settings["kl_target"]
    if args.episodes is None:
        episodes = made_episodes(args.env, int(settings["episodes"]), args.seed)
    else:
        episodes = [load_episode(path) for path in sorted(args.episodes.glob("*.npz"))]
    successes = [episode for episode in episodes if episode.success]
    if not successes:
        raise SystemExit(f"{len(episodes)} episodes, none succeeded: nothing to train the world on")
    arms = {"none": {"kl_weight": 0.0}, "large": {"kl_weight": LARGE}, "target": {"kl_target": target}}
    result: dict[str, Any] = {
        "env": args.env, "episodes": len(episodes), "successes": len(successes), "lr": lr, "kl_target": target,
        "large_weight": LARGE, "updates": args.updates,
        "reference_variance_spread": variance_spread(args.env, successes, VideoSFTConfig()),
    }  # fmt: skip
    for name, change in arms.items():
        config = VideoSFTConfig(lr=lr, held_out_share=HELD_OUT, **change)
        arm_started = time.monotonic()
        result[name] = run_arm(args.env, successes, args.updates, config, args.seed)
        result[name]["update_s"] = (time.monotonic() - arm_started) / args.updates
        drift = result[name]["drift_nats"]
        shown = "  ".join(f"{n}: {drift[n]:.4f}" for n in (1, 5, 10, 20) if n < len(drift))
        error = [result[name][key] for key in ("held_out_error_base", "held_out_error_last", "still_error")]
        print(f"{name:7} drift at update {shown}   weight after {result[name]['kl_weight_after']:g}   held-out {error}")
    result["wall_s"] = time.monotonic() - started
    args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
