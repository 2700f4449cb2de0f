"""`wamrl calibrate water_plants`: measure RLBench's scene where it is installed, to build our stand-in like it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from wamrl_ray.config_files import ConfigError


def run_calibrate(args: argparse.Namespace) -> int:
    """0 when the file is written, 1 when what was measured cannot be used; ConfigError before anything is launched."""
    from envs import rlbench_install
    from envs.rlbench_calibration import calibrate, read_rlbench

    seeds: list[int] = args.seeds
    if len(set(seeds)) < max(2, len(seeds)):
        raise ConfigError(f"--seeds {' '.join(map(str, seeds))}: use at least two, all different")
    if args.out.is_dir() or not args.out.absolute().parent.is_dir():
        raise ConfigError(f"--out {args.out}: use a file in a folder that exists")
    try:
        rlbench_install.require()
    except RuntimeError as error:
        raise ConfigError(str(error)) from None
    print(f"RLBench is launched and reset with {len(seeds)} seeds; this takes a minute or two.", flush=True)
    readings = read_rlbench(seeds)
    try:
        found = calibrate(readings, seeds)
    except ValueError as error:
        print(f"wamrl calibrate: {error}", file=sys.stderr)
        return 1
    found.save(args.out)
    values = asdict(found.geometry)
    print(f"{values['source']}, spread between seeds in mm: {found.measurement['spread_mm']}")
    for name, rule in found.measured.items():
        print(f"  {name:18s} {_rounded(values[name])}  {rule}")
    print("not measured, left as chosen:")
    for name, why in found.not_measured.items():
        print(f"  {name:18s} {_rounded(values[name])}  {why}")
    print(f"{args.out} is for `--env.geometry {args.out}`.  Who publishes its numbers: see `attribution` in it.")
    return 0


def _rounded(value: float | tuple[float, ...]) -> str:
    numbers = value if isinstance(value, tuple) else (value,)
    return " ".join(f"{number:.4f}" for number in numbers)
