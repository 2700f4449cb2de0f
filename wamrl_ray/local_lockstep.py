"""A rollout pool that acts many episodes side by side in one process: the network decides for all of them at once.

For sweeps and benchmarks with a small policy and environments cheap enough to hold hundreds of (`reach`): acting is
then some ten times faster.  The price is in the last bits, which depend on how many episodes are still running, so its
runs are not bit-equal to those of the other pools; two of its own are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from envs.base import ChunkEnv
from wamrl_ray.policy.acting import Question, decide_together
from wamrl_ray.policy.wam import WAM
from wamrl_ray.rollout import EpisodeSummary, Progress, summarise
from wamrl_ray.tickets import split_of
from wamrl_ray.training import Broker
from wamrl_ray.types import EnvSpec, Episode, Metrics, Pair, Split, Ticket


class LockstepPool:
    """`training.RolloutPool`; keeps one environment per episode that has ever run beside others."""

    def __init__(self, env_of: Callable[[Split], ChunkEnv], policy: WAM, broker: Broker) -> None:
        self._env_of, self._policy, self._broker = env_of, policy, broker
        self._envs: dict[Split, list[ChunkEnv]] = {"train": [env_of("train")], "held_out": []}
        self._loaded: tuple[str, str] | None = None

    @property
    def env_spec(self) -> EnvSpec:
        return self._envs["train"][0].env_spec

    @property
    def tasks(self) -> tuple[int, ...]:
        return self._envs["train"][0].tasks

    def run(self, tickets: Sequence[Ticket], pair: Pair) -> list[tuple[EpisodeSummary, Episode]]:
        """All tickets to their ends; an exception of an environment ends the run, as there is nothing to kill."""
        pair, world, actor = self._broker.pull(pair.order)
        if self._loaded != (pair.world, pair.actor):
            self._policy.load_pair(world, actor)
            self._loaded = (pair.world, pair.actor)
        progress = [
            Progress(env, self._policy.spec, ticket)
            for env, ticket in zip(self._environments(tickets), tickets, strict=True)
        ]
        while running := [one for one in progress if not one.done]:
            decisions = decide_together(self._policy, [Question(**one.question()) for one in running])
            for one, decision in zip(running, decisions, strict=True):
                one.advance(decision)
        episodes = [one.episode(pair) for one in progress]
        return [(summarise(episode), episode) for episode in episodes]

    def metrics(self) -> Metrics:
        """The names that `cluster_pool.ElasticPool` uses."""
        names = ("worker_errors", "reissued_tickets", "deadlines_missed", "worker_restarts")
        return {"rollout/workers": 1.0} | {f"rollout/{name}": 0.0 for name in names}

    def close(self) -> None:
        for env in (*self._envs["train"], *self._envs["held_out"]):
            env.close()  # type: ignore[no-untyped-call]  # gymnasium's

    def _environments(self, tickets: Sequence[Ticket]) -> list[ChunkEnv]:
        """One for each ticket, of its split; new ones are built as needed."""
        used: dict[Split, int] = {"train": 0, "held_out": 0}
        chosen = []
        for ticket in tickets:
            split = split_of(self.env_spec, ticket.init_state_id)
            if used[split] == len(self._envs[split]):
                self._envs[split].append(self._env_of(split))
            chosen.append(self._envs[split][used[split]])
            used[split] += 1
        return chosen
