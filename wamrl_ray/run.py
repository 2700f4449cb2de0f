"""A whole run: base evaluation, iterations with checkpoints, final evaluation, summary.  Both shells drive it.

`local.py` and `cluster.py` build a `System` from their own pool, ports and broker; everything after that is here.

    <run_dir>/  config.json  epoch.json  summary.json  evaluation/{base,final,iteration_N}.json
                checkpoints/iter_N/  episodes/*.npz (the store's, kept while a checkpoint lists them)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from wamrl_ray import checkpoint as checkpoints
from wamrl_ray.atomic import write_json
from wamrl_ray.evaluate import evaluate
from wamrl_ray.store import EpisodeStore
from wamrl_ray.tickets import TicketOffice
from wamrl_ray.training import ActorPort, Broker, Handle, RolloutPool, TrainingLoop, VideoPort
from wamrl_ray.types import EnvSpec, Metrics, Split

if TYPE_CHECKING:
    from wamrl_ray.config import Config

T = TypeVar("T")

STATE_DEADLINE_S = 1800.0
"""Wall seconds a learner may take to hand over or take in its state."""


class System:
    """Everything of one run, wired.  The shells construct it; `run_training` (or an outer framework) drives it."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        env_spec: EnvSpec,
        tasks: tuple[int, ...],
        pool: RolloutPool,
        video: VideoPort,
        actor: ActorPort,
        broker: Broker,
        persist: Callable[[Handle, Path], None],
        restore: Callable[[Path], Handle],
        close: Callable[[], None],
    ) -> None:
        """`persist` writes an episode to a path and `restore` makes a handle of one (store.save_episode, load_episode,
        wherever the episodes lie); `tasks` are the task ids the environment runs; the learners hold the base weights.
        """
        self.config, self.run_dir, self.env_spec = config, run_dir, env_spec
        self.pool, self.video, self.actor, self.broker = pool, video, actor, broker
        self.office = TicketOffice(config.seed, env_spec, config.rollout, tasks)
        self.store = EpisodeStore(config.store, config.video_learner.failures)
        self.loop = TrainingLoop(
            run_seed=config.seed,
            office=self.office,
            pool=pool,
            store=self.store,
            video=video,
            actor=actor,
            broker=broker,
            replay=config.video_learner.replay,
            failure_share=config.video_learner.failures.share,
        )
        self.base_evaluation: dict[str, Any] | None = None
        self.close = close
        self._persist, self._restore = persist, restore
        self._earlier_wall_s, self._started = 0.0, time.monotonic()

    @property
    def iteration(self) -> int:
        """Iterations done."""
        return self.loop.iteration

    @property
    def wall_s(self) -> float:
        """Wall seconds of the run, those before a resume included."""
        return self._earlier_wall_s + time.monotonic() - self._started

    def start(self, checkpoint: Path | None = None) -> None:
        """Publish the learners' base pair, or everything a checkpoint holds.  Call once, before anything else."""
        if checkpoint is None:
            world, actor = _value(self.video.export()), _value(self.actor.export())
            self.broker.begin(world, actor, interface=self.video.interface)
        else:
            self._restore_from(checkpoint)
        self.loop.align_learners()

    def step(self) -> Metrics:
        """One training iteration."""
        return self.loop.step() | {"time/wall_s": self.wall_s}

    def evaluate(self, split: Split, episodes: int) -> dict[str, Any]:
        """Evaluate the current pair (see `evaluate.evaluate`)."""
        tickets = self.office.eval_tickets(split, episodes)
        return evaluate(self.pool, tickets, self.broker.current(), env_spec=self.env_spec, split=split)

    def save(self) -> Path:
        """Write a checkpoint of the run as it is now; returns its folder.  Raises CheckpointError."""
        _, world, actor = self.broker.pull()
        video_state, actor_state = _value(self.video.state()), _value(self.actor.state())
        episodes = self.run_dir / "episodes"
        try:
            store = self.store.state(episodes, self._persist)
        except OSError as error:
            raise checkpoints.CheckpointError(
                f"{episodes} takes no more episodes ({error.strerror or error}); the last good checkpoint is "
                f"{checkpoints.load_latest(self.run_dir / 'checkpoints')}; make room, then continue with --resume auto"
            ) from error
        run = {
            "loop": self.loop.state(),
            "office": self.office.state(),
            "store": store,
            "broker": self.broker.state(),
            "base_evaluation": self.base_evaluation,
            "wall_s": self.wall_s,
            "env": self.env_spec.name,
            "simulator": self.env_spec.simulator,
        }
        parts = {
            "config.json": checkpoints.json_part(asdict(self.config)),
            "world.npz": checkpoints.snapshot_part(world),
            "actor.npz": checkpoints.snapshot_part(actor),
            "video_learner.pt": checkpoints.torch_part(video_state),
            "actor_learner.pt": checkpoints.torch_part(actor_state),
            "run.json": checkpoints.json_part(run),
        }
        root = self.run_dir / "checkpoints"
        folder = checkpoints.save(root, self.iteration, parts, self.config.checkpoint.keep)
        self._delete_unlisted_episodes(root, episodes)
        return folder

    def summary(self, final: Mapping[str, Any] | None) -> dict[str, Any]:
        """What `summary.json` holds."""
        pair = self.broker.current()
        return {
            "base_success": _success(self.base_evaluation),
            "final_success": _success(final),
            "world_digest": pair.world,
            "actor_digest": pair.actor,
            "pairs_committed": int(self.broker.metrics()["broker/pairs_committed"]),
            "iterations": self.iteration,
            "episodes": self.loop.episodes,
            "env_steps": self.loop.env_steps,
            "env": self.env_spec.name,
            "simulator": self.env_spec.simulator,
            "seed": self.config.seed,
            "wall_s": round(self.wall_s, 3),
        }

    def _restore_from(self, folder: Path) -> None:
        checkpoints.verify(folder)
        check_same_config(checkpoints.read_json(folder / "config.json"), asdict(self.config), folder)
        run = checkpoints.read_json(folder / "run.json")
        world, actor = (checkpoints.read_snapshot(folder / f"{name}.npz") for name in ("world", "actor"))
        self.broker.begin(world, actor, interface=self.video.interface, state=run["broker"])
        _value(self.video.load_state(checkpoints.read_torch(folder / "video_learner.pt")))
        _value(self.actor.load_state(checkpoints.read_torch(folder / "actor_learner.pt")))
        self.store.load_state(run["store"], folder.parent.parent / "episodes", self._restore)
        self.office.load_state(run["office"])
        self.loop.load_state(run["loop"])
        self.base_evaluation = run["base_evaluation"]
        self._earlier_wall_s = float(run["wall_s"])

    def _delete_unlisted_episodes(self, root: Path, episodes: Path) -> None:
        listed: set[str] = set()
        for folder in checkpoints.complete(root):
            listed |= set(EpisodeStore.files(checkpoints.read_json(folder / "run.json")["store"]))
        for path in episodes.glob("*.npz"):
            if path.name not in listed:
                path.unlink()


def run_training(
    system: System,
    *,
    iterations: int,
    resume: str | None = None,
    step: Callable[[], Metrics] | None = None,
    on_metrics: Callable[[int, Metrics], None] = lambda iteration, metrics: None,
    on_evaluation: Callable[[str, dict[str, Any]], None] = lambda name, result: None,
    on_clip: Callable[[str, dict[str, Any]], None] = lambda name, clip: None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Drive `system` to `iterations`; returns, and writes as summary.json, the summary.

    resume: None starts anew, "auto" continues from the newest sound checkpoint of the run folder if there is one, a
    path from that checkpoint.  `step` replaces `system.step` where an outer framework counts iterations (it must call
    `system.step` once).  `stop_requested` is asked before every iteration: True saves a checkpoint and returns a
    summary with `stopped` True and without a final evaluation.  Callbacks get (iteration just done, from 0; metrics),
    (name, `evaluate`'s result) and, after the first and the last iteration, (name, `ActorPort.clip`'s arrays).
    """
    run_dir, config = system.run_dir, system.config
    start_from = find_checkpoint(run_dir, resume)
    write_json(run_dir / "config.json", asdict(config))
    system.start(start_from)

    def evaluated(name: str) -> dict[str, Any]:
        result = system.evaluate(config.evaluation.split, config.evaluation.episodes)
        write_json(run_dir / "evaluation" / f"{name}.json", result)
        on_evaluation(name, result)
        return result

    if system.base_evaluation is None:
        system.base_evaluation = evaluated("base")
    saved_at = system.iteration if start_from is not None else -1
    while system.iteration < iterations:
        if stop_requested():
            if saved_at != system.iteration:
                system.save()
            return system.summary(None) | {"stopped": True}
        metrics = (step or system.step)()
        done = system.iteration
        on_metrics(done - 1, metrics)
        if done % config.checkpoint.every == 0 or done == iterations:
            system.save()
            saved_at = done
        clip = _value(system.actor.clip()) if done in (1, iterations) else None
        if clip is not None:
            on_clip(f"iteration_{done:06d}", clip)
        if config.evaluation.every and done % config.evaluation.every == 0 and done < iterations:
            evaluated(f"iteration_{done:06d}")
    final = evaluated("final") if iterations else system.base_evaluation
    summary = system.summary(final) | {"stopped": False}
    write_json(run_dir / "summary.json", summary)
    return summary


def find_checkpoint(run_dir: Path, resume: str | None) -> Path | None:
    """The checkpoint that `--resume` names.  Raises ValueError if it is none, or if a new run would mix with an old."""
    root = run_dir / "checkpoints"
    if resume is None:
        if checkpoints.complete(root):
            raise ValueError(
                f"run_dir = {run_dir}: there are checkpoints of an earlier run; continue it with --resume auto or "
                "name another folder"
            )
        return None
    if resume == "auto":
        return checkpoints.load_latest(root)
    folder = Path(resume)
    if not (folder / checkpoints.MANIFEST).is_file():
        latest = checkpoints.load_latest(folder / "checkpoints")
        if latest is None:
            raise ValueError(f"resume = {resume}: no checkpoint there; name a checkpoint or run folder, or use auto")
        return latest
    return folder


def check_same_config(saved: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Raise ValueError unless a resumed run is the same function of its config.

    Free to differ is how long and how often, who works, and on which device, because the machine may be another one
    (the last bits of the weights are then another device's).
    """
    free: tuple[str, ...] = ("iterations", "device", "checkpoint.", "evaluation.every")
    free += ("rollout.num_workers", "rollout.deadline_s", "rollout.max_attempts")

    def fixed(tree: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in _leaves(tree, "") if not name.startswith(free)}

    before, after = fixed(saved), fixed(now)
    for name in sorted(before.keys() | after.keys()):
        # JSON has no tuples: compare what both sides look like in it.
        if repr(before.get(name)) != repr(after.get(name)):
            raise ValueError(
                f"{name} = {after.get(name)!r}, but {folder} was made with {before.get(name)!r}: a resumed run keeps "
                "its config; use the old value, or start a new run"
            )


def _leaves(tree: Any, prefix: str) -> list[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        return [leaf for name, value in tree.items() for leaf in _leaves(value, f"{prefix}.{name}" if prefix else name)]
    return [(prefix, list(tree) if isinstance(tree, tuple) else tree)]


def _success(result: Mapping[str, Any] | None) -> dict[str, Any]:
    result = result or {"successes": 0, "trials": 0, "low": 0.0, "high": 1.0}
    return {name: result[name] for name in ("successes", "trials", "low", "high")}


def _value(future: Future[T]) -> T:
    return future.result(timeout=STATE_DEADLINE_S)
