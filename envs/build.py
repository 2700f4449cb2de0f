"""From a config to its environment: the one place to add a line for a new one.

Fed by the command line, `local.py` and the rollout workers; feeds them a `ChunkEnv`.  A simulator is imported when its
environment is built and not before, so every config can be read on a machine without any.
"""

from __future__ import annotations

from envs.base import ChunkEnv
from envs.counting import CountingConfig, CountingEnv
from envs.libero import LiberoConfig, LiberoEnv
from envs.reach import ReachConfig, ReachEnv
from envs.rlbench import RLBenchConfig, RLBenchEnv
from envs.water_plants import WaterPlantsConfig, WaterPlantsEnv
from wamrl_ray.types import Split

EnvConfig = LiberoConfig | WaterPlantsConfig | RLBenchConfig | ReachConfig | CountingConfig


def make_env(config: EnvConfig, split: Split) -> ChunkEnv:
    """The environment of `config`, able to start from the initial states of `split` only."""
    match config:
        case LiberoConfig():
            return LiberoEnv(config, split)
        case WaterPlantsConfig():
            return WaterPlantsEnv(config, split)
        case ReachConfig():
            return ReachEnv(config, split)
        case CountingConfig():
            return CountingEnv(config, split)
        case RLBenchConfig():
            return RLBenchEnv(config, split)
