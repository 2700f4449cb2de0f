"""Every metric's name, unit and meaning, and where they are written.  The training loop feeds it; people read it.

    {"learner/actor/approx_kl": 0.01, ...} ──► MetricsWriter ──► metrics.jsonl (one line per iteration), TensorBoard

The table is the documentation: `docs/metrics.md` is generated from it and a test compares a run's names with it.
A name is `part/what_unit`; `{k}` in a name stands for a number, `{kind}` for a simulator's fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from wamrl_ray.types import Metrics

JSONL = "metrics.jsonl"

EXPLAINED: Mapping[str, tuple[str, str]] = {
    "actor/advantage_std": ("reward", "spread of the advantages over all valid decisions, before normalisation (gae)"),
    "actor/approx_kl_nats": (
        "nats per decision",
        "the same as `kl_to_start` estimated from the samples (rho - 1 - log rho), to be compared with it",
    ),
    "actor/behaviour_logprob_gap_nats": (
        "nats per decision",
        "difference between the log-prob the worker stored and the learner's recomputation",
    ),
    "actor/clip_fraction": ("share", "decisions of which a transition's ratio was clipped (none under awr)"),
    "actor/clip_fraction_step{k}": ("share", "of single transitions, those of denoising step k"),
    "actor/critic_grad_norm": ("norm", "gradient norm of the critic before clipping"),
    "actor/critic_trusted": ("0 or 1", "whether the critic explained enough for its values to be used"),
    "actor/decisions_count": ("decisions", "decisions the update was made on"),
    "actor/dropped_error_count": ("episodes", "episodes left out of the update because they carry an error"),
    "actor/entropy_nats": ("nats", "of a transition per action entry (only with an entropy bonus)"),
    "actor/explained_variance": (
        "share",
        "of the new plain returns' variance that the critic explains before learning from them; 1 is all",
    ),
    "actor/filtered_group_share": (
        "share",
        "groups left out because their mean success lies outside [filter_low, filter_high] (group)",
    ),
    "actor/grad_norm": ("norm", "gradient norm of the action expert before clipping"),
    "actor/importance_weight_mean": ("ratio", "truncated weight of stale data; 1 if the learner's own weights acted"),
    "actor/kl_to_base_nats": ("nats per decision", "exact transition KL to the base expert, the anchor's size"),
    "actor/kl_to_behaviour_nats": (
        "nats per decision",
        "exact transition KL of the policy that acted to the one that learns; above 0 at once if another acted",
    ),
    "actor/kl_to_start_nats": (
        "nats per decision",
        "exact transition KL of the policy before the update to the one that learns; `target_kl` limits it",
    ),
    "actor/kl_to_start_step{k}_nats": ("nats", "the same of single transitions, those of denoising step k"),
    "actor/policy_loss": ("loss", "of the objective, mean over the update's decisions"),
    "actor/ratio_deviation_mean": ("ratio", "mean distance of the ratio from 1"),
    "actor/ratio_mean": ("ratio", "mean ratio of a decision's density to that before the update; 1 at first"),
    "actor/skipped_count": ("steps", "gradient steps skipped since the start because loss or gradient was not finite"),
    "actor/stopped_early": ("0 or 1", "whether `target_kl` ended the update early"),
    "actor/updates_count": ("updates", "actor updates since the start"),
    "actor/value_loss": ("loss", "Huber loss of the critic"),
    "actor/value_mean": ("reward", "mean value before the update"),
    "actor/value_target_mean": ("reward", "mean value target"),
    "actor/warming_up": ("0 or 1", "whether the expert still waits for its critic"),
    "actor/zero_advantage_share": (
        "share",
        "episodes that teach nothing because their group all got the same return (group)",
    ),
    "broker/committed": ("0 or 1", "whether this iteration published a new pair"),
    "broker/epoch": ("epochs", "of the current pair; rises at every start, restore and recovery"),
    "broker/feature_drift_nats": (
        "nats per feature",
        "mean feature KL between the current world and the one its actor was trained against",
    ),
    "broker/kept_pairs": ("pairs", "whose weights are available"),
    "broker/leases": ("workers", "that hold a pair"),
    "broker/pairs_committed": ("pairs", "published since the start, the base not counted"),
    "broker/publish_lag_updates": ("updates", "staged and not yet published, of the component that lags most"),
    "broker/refused_digest": ("offers", "refused since the start because the content did not hash to its digest"),
    "broker/refused_drift": ("offers", "refused since the start because the world had drifted too far from its actor"),
    "broker/refused_drift_unknown": ("offers", "refused since the start because nobody measured the drift"),
    "broker/refused_interface": (
        "offers",
        "refused since the start because codec, text encoder, normaliser or sizes differ",
    ),
    "broker/refused_layout": ("offers", "refused since the start because tensor names or shapes differ"),
    "broker/seq": ("pairs", "number of the current pair within its epoch"),
    "reward/decision_mean": ("reward", "mean over decisions of reconstruction and success reward together"),
    "reward/reconstruction_mean": (
        "reward",
        "mean over decisions; 1 is 'did what was imagined', 0 'stood still' (progress shaping)",
    ),
    "reward/scored_share": ("share", "decisions with an executed frame to compare with"),
    "reward/success_share": ("share", "episodes that succeeded, as the actor learner sees them"),
    "rollout/bytes": ("bytes", "of the iteration's episodes"),
    "rollout/deadlines_missed": ("tickets", "since the start: no episode in time, the worker was killed"),
    "rollout/decisions": ("decisions", "of the iteration"),
    "rollout/env_reward": ("reward", "mean per episode of the environment's own reward"),
    "rollout/env_steps": ("env steps", "of the iteration"),
    "rollout/episode_length_steps": ("env steps", "mean per episode"),
    "rollout/episodes": ("episodes", "of the iteration"),
    "rollout/faults/{kind}": ("attempts", "of `worker_errors`, those by this fault of a simulator (docs/rlbench.md)"),
    "rollout/info/drops_in_pot": ("drops", "mean at the episodes' ends, of five (water_plants)"),
    "rollout/info/poured": ("share", "episodes in which water was poured (water_plants, rlbench_water_plants)"),
    "rollout/info/reset_attempts": ("placements", "mean tried until a start was valid (rlbench)"),
    "rollout/info/success_without_pour": (
        "share",
        "episodes with the can where the drops should be before water (water_plants, rlbench_water_plants)",
    ),
    "rollout/info/ticks": ("ticks", "mean of control ticks; a gripper that moves takes more than one (water_plants)"),
    "rollout/reissued_tickets": ("tickets", "given out again since the start after a failed attempt"),
    "rollout/staleness_max_updates": ("pairs", "committed between acting and consuming, worst episode"),
    "rollout/staleness_updates": ("pairs", "committed between acting and consuming, mean; 0 in a synchronous run"),
    "rollout/success_rate": ("share", "successful training episodes (with exploration noise)"),
    "rollout/successes": ("episodes", "successful ones of the iteration"),
    "rollout/total_env_steps": ("env steps", "since the start of the run"),
    "rollout/total_episodes": ("episodes", "since the start of the run"),
    "rollout/worker_errors": ("attempts", "since the start that ended in an exception or a dead worker"),
    "rollout/worker_restarts": ("restarts", "of worker processes since the start"),
    "rollout/workers": ("workers", "ready or busy"),
    "store/bytes": ("bytes", "of the successes held for the video learner"),
    "store/dropped_error_failure": ("episodes", "unsuccessful ones with an error, not stored, since the start"),
    "store/dropped_error_success": ("episodes", "successful ones with an error, not stored, since the start"),
    "store/dropped_evicted_failure": ("episodes", "failures removed to make room, since the start"),
    "store/dropped_evicted_success": ("episodes", "successes removed to make room, since the start"),
    "store/dropped_failure": ("episodes", "failures not stored because the video learner asks for none, since start"),
    "store/dropped_pair_quota_failure": ("episodes", "failures beyond the quota of their behaviour pair, since start"),
    "store/dropped_start_quota_failure": (
        "episodes",
        "failures replaced by a newer one of the same task and initial state, since the start",
    ),
    "store/dropped_too_large_failure": ("episodes", "failures larger than their whole part of the store, since start"),
    "store/dropped_too_large_success": ("episodes", "successes larger than their whole part of the store, since start"),
    "store/episodes": ("episodes", "successes held for the video learner"),
    "store/failure_bytes": ("bytes", "of the failures held for the video learner"),
    "store/failures": ("episodes", "failures held for the video learner"),
    "store/tasks": ("tasks", "with at least one success in the store"),
    "time/iteration_s": ("s", "wall time of the iteration"),
    "time/publish_s": ("s", "export, drift, commit"),
    "time/rollout_s": ("s", "making the episodes"),
    "time/update_s": ("s", "both updates, which run side by side"),
    "time/wall_s": ("s", "wall time of the run, earlier attempts included"),
    "video/drift_before_nats": (
        "nats per feature",
        "mean feature KL from the pretrained world on the fixed probe batch before the update; 0 before the first",
    ),
    "video/drift_nats": ("nats per feature", "the same after the update; what `kl_target` limits"),
    "video/episodes_count": ("episodes", "the world update was made on; held-out starts are left out"),
    "video/failed_episodes": ("episodes", "failures handed to the video learner"),
    "video/failed_window_share": ("share", "of the trained windows that come from failures"),
    "video/failure_embed_norm": ("norm", "of the vector that marks failures (outcome_conditioned)"),
    "video/feature_kl_layer{k}_nats": ("nats per feature", "the same, of world model block k"),
    "video/feature_kl_nats": (
        "nats per feature",
        "KL of the current features to the pretrained reference's, mean over training batches and layers",
    ),
    "video/flow_loss": ("loss", "flow-matching error of the world model on executed frames"),
    "video/grad_norm": ("norm", "gradient norm of the world model before clipping"),
    "video/held_out_error_after": ("latent units squared", "the same after the update"),
    "video/held_out_error_before": (
        "latent units squared",
        "mean squared error of one-step imagination on starts never trained on, before the update",
    ),
    "video/held_out_windows_count": ("windows", "of starts never trained on, the error is measured on"),
    "video/kl_weight": ("weight", "lambda_KL of the update"),
    "video/new_episodes": ("episodes", "successes of this iteration handed to the video learner"),
    "video/pretraining_window_share": ("share", "of the trained windows that come from demonstrations"),
    "video/replayed_episodes": ("episodes", "earlier successes handed to the video learner"),
    "video/skipped": ("0 or 1", "the world stays: no success to train on, or the newest one waits for its actor"),
    "video/skipped_count": ("steps", "gradient steps skipped since the start because loss or gradient was not finite"),
    "video/steps_count": ("steps", "gradient steps of the update"),
    "video/still_error": ("latent units squared", "the same error of copying the newest frame: the yardstick"),
    "video/windows_count": ("windows", "decisions with an executed future to train on"),
}
"""Name -> (unit, one line)."""


def explained(name: str) -> tuple[str, str] | None:
    """(unit, meaning) of a metric, None if the table does not know it."""
    general = re.sub(r"\d+", "{k}", re.sub(r"^rollout/faults/\w+$", "rollout/faults/{kind}", name))
    return EXPLAINED.get(name) or EXPLAINED.get(general)


def as_markdown() -> str:
    """The table of `docs/metrics.md`; `python -m wamrl_ray.metrics > docs/metrics.md` writes it."""
    lines = [
        "# Metrics",
        "",
        "One line per iteration in a run folder's `metrics.jsonl`, and the same names in TensorBoard.",
        "The learners' equations are in [learners.md](learners.md).",
        "",
        "| name | unit | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| `{name}` | {unit} | {meaning} |" for name, (unit, meaning) in sorted(EXPLAINED.items())]
    return "\n".join(lines) + "\n"


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics file, oldest first; empty if there is none.

    A last line without its end was torn by a kill and is left out: its iteration is done again.
    """
    path = run_dir / JSONL
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class MetricsWriter:
    """Appends a run's metrics to its folder; at a resume, what an earlier attempt wrote beyond it is dropped first.

    `first_iteration` is the iteration whose metrics come next: 0 for a fresh run, the number done for a resumed one.
    """

    def __init__(self, run_dir: Path, first_iteration: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second to import, and not every command needs it

        run_dir.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_metrics(run_dir) if line["iteration"] < first_iteration]
        self._path = run_dir / JSONL
        self._path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_iteration)

    def write(self, iteration: int, metrics: Metrics) -> None:
        """One line {"iteration": i, name: value, ...} and one point per curve, on disk when this returns."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"iteration": iteration, **dict(sorted(metrics.items()))}, allow_nan=False) + "\n")
        for name, value in sorted(metrics.items()):
            self._board.add_scalar(name, value, iteration)
        self._board.flush()

    def close(self) -> None:
        self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


if __name__ == "__main__":
    print(as_markdown(), end="")
