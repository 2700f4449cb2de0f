"""What a collecting worker does with a ticket; the cluster puts it behind an actor, one process uses it as it is.

Fed with tickets by `collect.py`; feeds it demonstrations.  Like a rollout worker's episode, a demonstration is a
function of its ticket, so who runs it, how often and in which order leaves no trace.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from envs.base import ChunkEnv
from envs.build import EnvConfig, make_env
from wamrl_ray.collect_expert import CollectConfig, demonstrate
from wamrl_ray.types import Demonstration, Ticket

if TYPE_CHECKING:
    from wamrl_ray.policy.wam import WAM


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What the pool knows of a demonstration, beside its handle."""

    ticket: Ticket


class Demonstrator:
    """Runs one ticket at a time, `ticket.run_seed` being the demonstration's seed.

    The constructor only keeps its arguments; what can fail or takes long is `setup`, which may be called repeatedly.
    """

    def __init__(self, env: EnvConfig, config: CollectConfig, base: str | None) -> None:
        self._env_config, self._config, self._base = env, config, base
        self._env: ChunkEnv | None = None
        self._policy: WAM | None = None
        self._base_digest = ""

    def setup(self) -> int:
        """Load the policy, if one is to act, and build the environment; returns the process id."""
        if self._base is not None and self._policy is None:
            import torch

            from wamrl_ray.policy.bases import load_base

            torch.set_num_threads(1)
            self._policy, self._base_digest = load_base(self._base), base_digest(self._base)
        self._env = self._env or make_env(self._env_config, "train")
        return os.getpid()

    def run(self, ticket: Ticket, pair: None = None) -> tuple[Recorded, Demonstration]:
        """One demonstration.  After an exception the simulator is not trusted: the next ticket gets a fresh one."""
        env = self._env = self._env or make_env(self._env_config, "train")
        try:
            demonstration = demonstrate(
                env, ticket.task_id, ticket.init_state_id, ticket.run_seed, self._config, self._policy
            )
        except Exception:
            self.close()
            raise
        return Recorded(ticket=ticket), replace(demonstration, base=self._base_digest)

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()  # type: ignore[no-untyped-call]  # gymnasium's


def base_digest(base: str) -> str:
    """First 16 hex digits of the sha256 of a base's files.  Raises ValueError if there is no such base."""
    from wamrl_ray.policy.bases import find_base

    folder, digest = find_base(base), hashlib.sha256()
    for name in ("config.json", "weights.safetensors"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()[:16]
