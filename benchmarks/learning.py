"""Does every learner preset learn?  On `reach`, from the shipped weak base, within five minutes on two cores.

    python -m benchmarks.learning --json OUT [--presets pi_rl grpo] [--seeds 0 1 2]

Every preset trains with `configs/reach.yaml` on top, so all of them have the same episodes, from the same training
tickets, and then meets the same held-out tickets as the base, acting with the deterministic sampler.  Counts are pooled
over the seeds.  One job is one (preset, seed) in one process with one thread; two processes work the queue.

OUT holds per preset PRESET_base_successes, PRESET_final_successes, PRESET_trials (of each of the two), PRESET_p_value
and PRESET_cpu_s (training and evaluation, all seeds), and once train_episodes (per preset and seed) and wall_s.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from wamrl_ray.atomic import write_json
from wamrl_ray.commands_eval import check_writable
from wamrl_ray.config import Config, load_config
from wamrl_ray.evaluate import wilson
from wamrl_ray.local import build_local

PRESETS = ("pi_rl", "wam_rl", "grpo", "awr", "flow_noise")
RUN = "reach"
PROCESSES = 2


@dataclass(frozen=True, kw_only=True)
class Job:
    """Base or preset, one seed.  main -> worker process."""

    preset: str | None
    "a name under configs/learners; None evaluates the base as it is"
    seed: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Worker process -> main."""

    job: Job
    successes: int
    trials: int
    train_episodes: int
    evaluated_as: tuple[str, int]
    "digest of the base world, denoising steps: what every evaluation of a seed must share"
    cpu_s: float


def config_of(job: Job) -> Config:
    """Raises ConfigError if there is no such preset."""
    files = [RUN] if job.preset is None else [f"learners/{job.preset}", RUN]
    return load_config(files, ["--seed", str(job.seed)])


def run(job: Job) -> Outcome:
    """Train, unless it is the base, and evaluate on the held-out tickets."""
    started = time.process_time()
    config = config_of(job)
    with tempfile.TemporaryDirectory() as folder:
        system = build_local(config, Path(folder), lockstep=True)
        try:
            system.start()
            base_world = system.broker.current().world
            for _ in range(0 if job.preset is None else config.iterations):
                system.step()
            result = system.evaluate("held_out", config.evaluation.episodes)
        finally:
            system.close()
    return Outcome(
        job=job,
        successes=result["successes"],
        trials=result["trials"],
        train_episodes=system.loop.episodes,
        evaluated_as=(base_world, config.sampler.num_steps),
        cpu_s=time.process_time() - started,
    )


def outcomes(jobs: Sequence[Job], deadline_s: float) -> Iterator[Outcome]:
    """Run the jobs in forked processes, which share the imports; outcomes as they come.

    Raises TimeoutError if not all are there `deadline_s` after the start, BrokenProcessPool if a process was killed.
    Whatever it raises, the processes have ended.
    """
    torch.set_num_threads(1)  # a thread pool would not survive the fork
    done, others = 0, set(multiprocessing.active_children())
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("fork")) as pool:
        try:
            for future in as_completed([pool.submit(run, job) for job in jobs], timeout=deadline_s):
                yield future.result()
                done += 1
        except TimeoutError:
            raise TimeoutError(f"{done} of {len(jobs)} jobs were done after {deadline_s:g} s") from None
        finally:
            if done < len(jobs):  # the executor itself would wait for the jobs that run
                for process in set(multiprocessing.active_children()) - others:
                    process.terminate()


def two_proportion_p_value(successes: int, trials: int, other_successes: int, other_trials: int) -> float:
    """Two-sided p-value of the pooled two-proportion z-test (NIST/SEMATECH e-Handbook, section 7.3.3).

    z = (p1 - p2) / √(p (1 - p) (1/n1 + 1/n2)) with the pooled p = (x1 + x2) / (n1 + n2); p-value = erfc(|z| / √2).
    Base and final meet the same tickets; the test takes them as independent, which is on the cautious side when what
    is easy for one is easy for the other.  1 where all or none succeed: nothing then tells the two apart.
    """
    for x, n in ((successes, trials), (other_successes, other_trials)):
        if not 0 <= x <= n or n == 0:
            raise ValueError(f"successes = {x} of trials = {n}: use 0..trials of at least 1 trial")
    pooled = (successes + other_successes) / (trials + other_trials)
    variance = pooled * (1 - pooled) * (1 / trials + 1 / other_trials)
    if variance == 0:
        return 1.0
    z = (successes / trials - other_successes / other_trials) / math.sqrt(variance)
    return math.erfc(abs(z) / math.sqrt(2))


def figures(results: Sequence[Outcome]) -> dict[str, float]:
    """The JSON figures of a set of outcomes, without `wall_s`.

    Raises ValueError if budgets or evaluations differ: the presets could not be compared then.
    """
    base = {result.job.seed: result for result in results if result.job.preset is None}
    trained = [result for result in results if result.job.preset is not None]
    budgets = sorted({result.train_episodes for result in trained})
    if len(budgets) != 1:
        raise ValueError(f"train_episodes = {budgets}: presets have different budgets; set them in configs/{RUN}.yaml")
    for result in trained:
        other = base[result.job.seed]
        if (result.evaluated_as, result.trials) != (other.evaluated_as, other.trials):
            raise ValueError(
                f"{result.job}: evaluated as {result.evaluated_as} on {result.trials} tickets, the base as "
                f"{other.evaluated_as} on {other.trials}: a preset must leave base, sampler.num_steps and evaluation"
            )
    out: dict[str, float] = {}
    for preset in dict.fromkeys(result.job.preset for result in trained):
        own = [result for result in trained if result.job.preset == preset]
        before = sum(base[result.job.seed].successes for result in own)
        after, trials = sum(result.successes for result in own), sum(result.trials for result in own)
        out[f"{preset}_base_successes"], out[f"{preset}_final_successes"] = before, after
        out[f"{preset}_trials"] = trials
        out[f"{preset}_p_value"] = two_proportion_p_value(after, trials, before, trials)
        out[f"{preset}_cpu_s"] = round(sum(result.cpu_s for result in own), 1)
    return out | {"train_episodes": budgets[0]}


def table(found: dict[str, float], presets: Sequence[str]) -> str:
    """One line per preset: both proportions with their Wilson 95 % intervals, their ratio, the p-value."""
    lines = [f"{'preset':<12} {'base':>22}   {'final':>22}   ratio   p-value"]
    for preset in presets:
        trials = int(found[f"{preset}_trials"])
        before, after = (int(found[f"{preset}_{name}_successes"]) for name in ("base", "final"))
        ratio = f"{after / before:.2f}" if before else "-"
        lines.append(
            f"{preset:<12} {_proportion(before, trials)}   {_proportion(after, trials)}   {ratio:>5}"
            f"   {found[f'{preset}_p_value']:.1e}"
        )
    return "\n".join(lines)


def _proportion(successes: int, trials: int) -> str:
    low, high = wilson(successes, trials)
    return f"{successes:3d}/{trials:<3d} [{low:.3f}, {high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here, as one flat JSON object")
    parser.add_argument("--presets", nargs="+", default=PRESETS, help="names under configs/learners; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument("--deadline-s", type=float, default=1800.0, help="wall seconds after which it gives up")
    args = parser.parse_args()
    started = time.monotonic()
    jobs = [Job(preset=preset, seed=seed) for preset in (None, *args.presets) for seed in args.seeds]
    for job in jobs:
        config_of(job)  # a misspelt preset must not be found out after minutes, nor a file that cannot be written
    if args.json:
        check_writable(args.json)
    results = []
    for result in outcomes(jobs, args.deadline_s):
        results.append(result)
        name = result.job.preset or "base"
        counts = f"{result.successes}/{result.trials}"
        print(f"{name} seed {result.job.seed}: {counts}, {result.cpu_s:.1f} CPU s", flush=True)
    found = figures(sorted(results, key=lambda result: jobs.index(result.job)))
    found["wall_s"] = round(time.monotonic() - started, 1)
    print(table(found, args.presets))
    print(json.dumps(found, indent=2))
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
