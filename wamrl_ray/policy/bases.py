"""Base checkpoints on disk: `config.json` and `weights.safetensors` in a folder, or the name of a shipped one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file
from safetensors.torch import save as serialise
from torch import Tensor

from wamrl_ray.atomic import replacing
from wamrl_ray.policy.flow_sde import NOISE_HEAD, SamplerConfig
from wamrl_ray.policy.wam import WAM, WAMConfig
from wamrl_ray.policy.weights import load_strict

SHIPPED = Path(__file__).parent.parent / "bases"


def shipped_bases() -> list[str]:
    return sorted(path.parent.name for path in SHIPPED.glob("*/config.json"))


def find_base(name_or_dir: str | Path) -> Path:
    """The folder of a base.  Raises ValueError that lists the shipped names."""
    for path in (Path(name_or_dir), SHIPPED / str(name_or_dir)):
        if (path / "config.json").is_file() and (path / "weights.safetensors").is_file():
            return path
    raise ValueError(
        f"base = {str(name_or_dir)!r}: no config.json + weights.safetensors there; "
        f"pass a folder that has both or one of the shipped names {shipped_bases()}"
    )


def save_base(policy: WAM, folder: Path, dtype: torch.dtype = torch.float16) -> None:
    """Write a base, each of its files whole or not at all.  float16 halves the weights; what is loaded from them is
    what every digest then refers to."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: t.detach().cpu().to(t.dtype if name.startswith("normalizer.") else dtype).contiguous().clone()
        for name, t in policy.state_dict().items()
    }
    with replacing(folder / "weights.safetensors") as file:
        file.write(serialise(weights))
    with replacing(folder / "config.json") as file:
        file.write((json.dumps(asdict(policy.config), indent=2) + "\n").encode())


def load_base(name_or_dir: str | Path, sampler: SamplerConfig | None = None) -> WAM:
    """Build the policy a base describes, float32.  Raises ValueError for a missing, foreign or damaged base."""
    folder = find_base(name_or_dir)
    try:
        config = TypeAdapter(WAMConfig).validate_json((folder / "config.json").read_text())
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{folder / 'config.json'}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    policy = WAM(config, sampler)
    weights = {name: t.float() for name, t in load_file(folder / "weights.safetensors").items()}
    broken = sorted(name for name, tensor in weights.items() if not bool(torch.isfinite(tensor).all()))
    if broken:
        raise ValueError(f"{folder / 'weights.safetensors'}: {broken[0]} is not finite: train the policy again")
    load_strict(policy, _with_own_noise_head(policy, weights), str(folder / "weights.safetensors"))
    policy.text.forget()
    return policy


def _with_own_noise_head(policy: WAM, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A base says how to act; how to explore is the run's: without a noise head in the file the policy's new one stays,
    and a policy without one does not need the file's."""
    head = {name: t for name, t in policy.state_dict().items() if name.startswith(f"expert.{NOISE_HEAD}")}
    rest = {name: t for name, t in weights.items() if head or not name.startswith(f"expert.{NOISE_HEAD}")}
    return head | rest
