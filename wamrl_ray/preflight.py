"""What is checked before any worker, learner or simulator is started.  Commands feed it; it answers with ConfigError.

Each check names the field or option, its value and the remedy, so a wrong run ends in a second with exit code 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from wamrl_ray.config_files import ConfigError, ConfigTree, parse_overrides
from wamrl_ray.pretraining import check_pretraining
from wamrl_ray.types import EnvSpec, PolicySpec, Split

if TYPE_CHECKING:
    from wamrl_ray.config import Config, EnvConfig
    from wamrl_ray.policy.flow_sde import SamplerConfig
    from wamrl_ray.policy.wam import WAM

ENV_NAMES = (
    "reach, counting, water_plants, a LIBERO suite such as libero_object, "
    "or an RLBench task such as rlbench_water_plants"
)


def check_run(config: Config) -> EnvSpec:
    """Base, environment, their fit, demonstrations to replay, and the renderer.  Returns the environment's spec."""
    check_installed(config.env)
    policy = load_policy(config.base, config.sampler)
    env_spec = describe_env(config.env)
    check_fit(policy.spec, env_spec, config.base)
    try:
        check_pretraining(config.video_learner.pretraining, policy.config)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    check_renderer(config.env)
    return env_spec


def check_installed(env: EnvConfig) -> None:
    """The simulator that does not come with this project is there.  Asked first: what follows takes seconds."""
    if env.kind != "rlbench":
        return
    from envs.rlbench_install import require

    try:
        require()
    except RuntimeError as error:
        raise ConfigError(f"env.kind = {env.kind!r}: {error}") from None


def load_policy(name_or_dir: str | Path, sampler: SamplerConfig | None = None) -> WAM:
    """The base of that name or folder; ConfigError lists the shipped ones if there is none."""
    from wamrl_ray.policy.bases import load_base

    try:
        return load_base(name_or_dir, sampler)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def describe_env(env: EnvConfig, split: Split = "train") -> EnvSpec:
    """The spec of an environment, without starting its simulator."""
    from envs.build import make_env

    try:
        built = make_env(env, split)
    except (ValueError, RuntimeError, ImportError) as error:
        raise ConfigError(f"env.kind = {env.kind!r} cannot be built: {error}") from None
    spec = built.env_spec
    built.close()  # type: ignore[no-untyped-call]
    return spec


def check_fit(policy: PolicySpec, env: EnvSpec, base: str | Path) -> None:
    """A policy acts only in an environment with its own sizes and views."""
    for name in ("resolution", "action_dim", "state_dim", "views"):
        wanted, found = getattr(policy, name), getattr(env, name)
        if wanted != found:
            raise ConfigError(
                f"base = {str(base)!r} was made for {name} = {wanted!r}, but env {env.name!r} has {name} = {found!r}: "
                "use a base of this environment, or give the environment the base's size"
            )


def check_renderer(env: EnvConfig) -> None:
    """An off-screen GL context can be made, if this environment draws with one."""
    if env.kind not in ("libero", "water_plants"):
        return
    from envs.render import probe_renderer

    try:
        probe_renderer()
    except RuntimeError as error:
        raise ConfigError(str(error)) from None


def env_config(name: str, resolution: int | None = None, settings: Sequence[str] = ()) -> EnvConfig:
    """`--env NAME` as a config; `resolution` is the policy's, None the environment's default.

    `settings` are words of the command line, `["--env.scoring", "rlbench_compat"]`.  Raises ConfigError.
    """
    from envs.counting import CountingConfig
    from envs.libero import LiberoConfig
    from envs.reach import ReachConfig
    from envs.rlbench import RLBenchConfig
    from envs.water_plants import WaterPlantsConfig

    env: EnvConfig
    if name == "reach":
        env = ReachConfig()
    elif name == "counting":
        env = CountingConfig()
    elif name == "water_plants":
        env = WaterPlantsConfig()
    elif name == "water_plants_rlbench_compat":
        env = WaterPlantsConfig(scoring="rlbench_compat")
    elif name.startswith("libero"):
        env = LiberoConfig(suite=name)
    elif name.startswith("rlbench_"):
        task = "".join(word.capitalize() for word in name.removeprefix("rlbench_").split("_"))
        env = RLBenchConfig(task=task)
    else:
        raise ConfigError(f"--env {name}: unknown environment; use {ENV_NAMES}")
    if resolution is not None:
        env = replace(env, resolution=resolution)
    if not settings:
        return env
    from wamrl_ray.config import Config

    tree = ConfigTree(Config)
    tree.add({"env": asdict(env)}, f"--env {name}")
    for values in parse_overrides(settings):
        tree.add(values, "command line")
    return tree.build().env


def split_env_settings(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words of a command line -> those of `--env.KEY VALUE`, and the others."""
    settings: list[str] = []
    others: list[str] = []
    taken = others
    for word in words:
        if word.startswith("--"):
            taken = settings if word.startswith("--env.") else others
        taken.append(word)
    return settings, others
