"""docs/learners.md is in step with the code: settings with their defaults, tests it names, figures it gives."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from learners.policy_update import Objective
from learners.ppo import PPOConfig, clip_scale
from wamrl_ray.config import Config
from wamrl_ray.config_files import shipped_presets
from wamrl_ray.policy.flow_sde import SamplerConfig, sigma_grid, transition_std, velocity_sensitivity

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "learners.md").read_text(encoding="utf-8")
SECTIONS = ("sampler", "reward", "actor_learner", "video_learner")
"""of a run's config, documented with all that is nested in them"""


def dataclasses_in(hint: Any) -> Iterator[type]:
    """The dataclass, or those of the union, and all that their fields hold."""
    if isinstance(hint, types.UnionType):
        for member in typing.get_args(hint):
            yield from dataclasses_in(member)
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield hint
        for inner in typing.get_type_hints(hint).values():
            yield from dataclasses_in(inner)


def documented() -> list[type]:
    hints = typing.get_type_hints(Config)
    return list(dict.fromkeys(found for name in SECTIONS for found in dataclasses_in(hints[name])))


def written(default: Any) -> str:
    """As a config file would have it; a nested section by the name of its class."""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, float):
        return re.sub(r"e([-+])0", r"e\1", f"{default:g}")
    if isinstance(default, tuple):
        return f"[{', '.join(written(part) for part in default)}]"
    return type(default).__name__ if dataclasses.is_dataclass(default) else str(default) or '""'


def rows(config: type) -> list[tuple[str, str]]:
    """(field, default) of a class, `kind` left out: it stands in the section's first line."""
    instance = config()
    names = [f.name for f in dataclasses.fields(config) if f.name != "kind"]
    return [(name, written(getattr(instance, name))) for name in names]


def section(config: type) -> str:
    """The part of the docs under the heading that names the class."""
    parts = [part for part in re.split(r"^##+ ", TEXT, flags=re.M)[1:] if f"`{config.__name__}`" in part.split("\n")[0]]
    assert len(parts) == 1, f"docs/learners.md needs one heading '### `{config.__name__}`', it has {len(parts)}"
    return parts[0]


@pytest.mark.parametrize("config", documented(), ids=lambda config: config.__name__)
def test_every_setting_of_the_learners_is_documented_with_its_default(config: type) -> None:
    text = section(config)
    table = re.findall(r"^\| `(\w+)` \| `(.*?)` \| .+ \| .+ \|$", text, flags=re.M)
    assert sorted(table) == sorted(rows(config))
    if kind := getattr(config(), "kind", None):
        assert f"`kind: {kind}`" in text


def test_every_test_the_docs_name_exists() -> None:
    files = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").glob("test_*.py")]
    there = {name for text in files for name in re.findall(r"def (test_\w+)", text)}
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert named and named - there == set()


def test_every_learner_preset_is_explained() -> None:
    presets = [name.removeprefix("learners/") for name in shipped_presets() if name.startswith("learners/")]
    assert [name for name in presets if f"| `{name}` |" not in TEXT] == []


def leaves(tree: dict[str, Any], under: str = "") -> dict[str, str]:
    """{dotted key: value as written} of a preset."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{under}{key}.") if isinstance(value, dict) else {f"{under}{key}": written(value)}
    return found


def row_of(preset: str) -> dict[str, str]:
    """The same of its row in section 10: `section`: `field` value, `field` value; `section`: ..."""
    cell = re.search(rf"^\| `{preset}` \| (`.+?:.+?) \| .+ \|$", TEXT, flags=re.M)
    assert cell, f"section 10 has no row of {preset}"
    parts = [part.split(": ", 1) for part in cell[1].split("; ")]
    return {f"{name.strip('`')}.{field}": value for name, fields in parts
            for field, value in re.findall(r"`(\w+)` ([^,]+)", fields)}  # fmt: skip


@pytest.mark.parametrize("preset", [name for name in shipped_presets() if name.startswith("learners/")])
def test_the_row_of_a_preset_names_every_setting_of_its_file_and_no_other(preset: str) -> None:
    tree = yaml.safe_load((ROOT / "configs" / f"{preset}.yaml").read_text(encoding="utf-8"))
    assert row_of(preset.removeprefix("learners/")) == leaves(tree)


def test_the_documented_skeleton_has_the_methods_of_an_objective() -> None:
    block = re.search(r"^```python\n(.+?)^```", TEXT, flags=re.M | re.S)
    assert block
    names: dict[str, Any] = {"__name__": __name__}
    exec(block[1], names)
    skeleton = names["Reinforce"](names["ReinforceConfig"](), SamplerConfig())
    for method in ("prepare", "loss"):
        asked, given = inspect.signature(getattr(Objective, method)), inspect.signature(getattr(type(skeleton), method))
        assert given == asked


def test_the_table_of_steps_holds_what_the_code_computes() -> None:
    for k in range(4):
        std, slope = transition_std(k, 4, 0.5), velocity_sensitivity(k, 4, 0.5)
        figures = f"{std:.3f} | {slope:.3f} | {abs(slope) / std:.3f} | {slope**2 / (2 * std**2):.3f}"
        assert figures in TEXT, f"step {k}: {figures}"


@pytest.mark.parametrize("exclude_last", [True, False])
@pytest.mark.parametrize("schedule", ["constant", "exponential", "sensitivity"])
def test_the_table_of_clip_widths_holds_what_the_code_computes(schedule: Any, exclude_last: bool) -> None:
    scale = clip_scale(PPOConfig(clip_schedule=schedule), SamplerConfig(exclude_last=exclude_last))
    widths = [f"{0.2 * float(factor):.3f}" for factor in scale]
    if exclude_last:
        widths[-1] = "-"
    line = f"| `{schedule}` | {str(exclude_last).lower()} | {' | '.join(widths)} |"
    assert line in TEXT, line


def test_the_factors_by_which_euler_steps_shrink_a_gaussian_are_the_documented_ones() -> None:
    """Exact velocity of data N(0, s^2) under independent noise: its regression on x is Cov(v, x) / Var(x)."""
    std, factors = 0.5, []
    for sigma in sigma_grid(4)[:-1]:
        slope = (sigma - (1 - sigma) * std**2) / ((1 - sigma) ** 2 * std**2 + sigma**2)
        factors.append(1 - slope / 4)
    text = " ".join(TEXT.split())
    assert f"the factors are {', '.join(f'{factor:.3f}' for factor in factors)}:" in text
    assert f"trained on a std of {std} acts with {math.prod(factors):.3f}." in text
