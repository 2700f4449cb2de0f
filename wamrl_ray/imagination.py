"""How well a policy imagines: its frame at the last executed offset against the executed one, beside a mere copy.

`wamrl eval --imagination` feeds it a policy and undisturbed expert episodes; it feeds that command's table, JSON file
and contact sheet.  The yardstick is the frame at decision time, copied: a world model that knows nothing but "nothing
moves" has an error ratio of 1, a perfect one of 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from wamrl_ray.types import Demonstration, Frames, PolicySpec, seed_sequence

if TYPE_CHECKING:
    from wamrl_ray.policy.wam import WAM

METRICS = ("mse", "mae")
"""mean squared and mean absolute difference of pixels in [0, 1]"""

SHEET_ROWS, SHEET_SIDE, SHEET_BAR = 10, 192, 24
"""decisions on a contact sheet (at least one per task); least pixels of a frame's side; of a label's height"""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One episode's n decisions whose future frame exists.  compare -> summarise, write_sheet.

    Example (LIBERO, E 8, success after 103 steps): n 12, step [0, 8, ..., 88], imagined {1: ..., 4: ...}; the frame
    after 104 steps was never drawn.
    """

    task_id: int
    instruction: str
    offset: int
    "env steps from a decision to the compared frame"
    step: NDArray[np.int64]
    "(n,) env steps before each decision"
    copied: NDArray[np.float64]
    "(n, V, metric) error of the frame at decision time"
    imagined: Mapping[int, NDArray[np.float64]]
    "denoising steps -> (n, V, metric) error of the imagined frame"
    pictures: Frames
    "(n, 3, V, h, w, 3) current, executed, and imagined with the most denoising steps"


def last_executed_offset(spec: PolicySpec) -> int:
    """The latest imagined offset that has an executed counterpart, env steps.  ValueError if there is none."""
    offsets = [offset for offset in spec.imagined_offsets if offset <= spec.executed]
    if not offsets:
        raise ValueError(
            f"policy.imagined_offsets = {spec.imagined_offsets}: none lies within the {spec.executed} executed steps, "
            "so nothing imagined can be compared; use a policy that imagines an executed step"
        )
    return max(offsets)


def compare(policy: WAM, demo: Demonstration, steps: Sequence[int]) -> Comparison | None:
    """Imagine at every E-th env step of an episode, with each number of denoising `steps`; None if it was too short.

    The noise is a function of the episode's seed and initial state.  Raises ValueError if the demonstration was not
    captured at all decision times.
    """
    spec = policy.spec
    offset = last_executed_offset(spec)
    obs_at = {int(step): n for n, step in enumerate(demo.obs_step)}
    decided = list(range(0, len(demo.action), spec.executed))
    if any(step not in obs_at for step in decided):
        raise ValueError(f"obs_step = {demo.obs_step.tolist()}: capture at every {spec.executed} env steps")
    step = np.array([step for step in decided if step + offset in obs_at], np.int64)
    if len(step) == 0:
        return None

    past = np.arange(1 - spec.memory, 1) * spec.executed
    memory = [[obs_at[max(0, int(s + back))] for back in past] for s in step]
    obs = policy.encode(torch.from_numpy(demo.frames[np.array(memory)]), [demo.instruction] * len(step))
    seeds = seed_sequence(demo.seed, demo.init_state_id, "imagine").generate_state(len(step), np.uint32)
    place = spec.imagined_offsets.index(offset)
    imagined = {count: policy.imagine(obs, seeds.tolist(), count)[:, place].cpu() for count in steps}
    now, executed = (
        policy.round_trip(torch.from_numpy(demo.frames[[obs_at[int(s)] for s in at]])) for at in (step, step + offset)
    )
    return Comparison(
        task_id=demo.task_id,
        instruction=demo.instruction,
        offset=offset,
        step=step,
        copied=pixel_errors(now, executed),
        imagined={count: pixel_errors(frames, executed) for count, frames in imagined.items()},
        pictures=(torch.stack([now, executed, imagined[max(steps)]], dim=1) * 255.0).round().to(torch.uint8).numpy(),
    )


def pixel_errors(a: Tensor, b: Tensor) -> NDArray[np.float64]:
    """(n, V, h, w, 3) float in [0, 1] twice -> (n, V, 2): mean squared and mean absolute difference."""
    difference = (a - b).double().flatten(2)
    errors: NDArray[np.float64] = torch.stack([difference.square(), difference.abs()], dim=-1).mean(dim=2).numpy()
    return errors


# ------------------------------------------------------------------------------------------------ table


def summarise(comparisons: Sequence[Comparison], views: Sequence[str]) -> dict[str, Any]:
    """Mean errors over decisions and their ratios, JSON-able; `comparisons` must not be empty.

    decisions, overall [row], views {name: [row]}, tasks [{task_id, instruction, decisions, errors: [row]}] with one row
    {metric, steps, imagined, copied, ratio} per metric and number of denoising steps; ratio is the mean imagined over
    the mean copied error, None where nothing moved.
    """
    tasks = {}
    for task in sorted({c.task_id for c in comparisons}):
        own = [c for c in comparisons if c.task_id == task]
        tasks[task] = {
            "task_id": task,
            "instruction": own[0].instruction,
            "decisions": sum(len(c.step) for c in own),
            "errors": _rows(own, slice(None)),
        }
    return {
        "decisions": sum(len(c.step) for c in comparisons),
        "overall": _rows(comparisons, slice(None)),
        "views": {name: _rows(comparisons, slice(v, v + 1)) for v, name in enumerate(views)},
        "tasks": list(tasks.values()),
    }


def _rows(comparisons: Sequence[Comparison], views: slice) -> list[dict[str, Any]]:
    rows = []
    for m, metric in enumerate(METRICS):
        copied = float(np.concatenate([c.copied[:, views, m] for c in comparisons]).mean())
        for steps in comparisons[0].imagined:
            imagined = float(np.concatenate([c.imagined[steps][:, views, m] for c in comparisons]).mean())
            ratio = imagined / copied if copied > 0 else None
            rows.append({"metric": metric, "steps": steps, "imagined": imagined, "copied": copied, "ratio": ratio})
    return rows


def table(summary: Mapping[str, Any]) -> str:
    """`summarise`'s result as text: per group and column the imagined error, the copied one and their ratio."""
    groups = [("overall", summary["overall"])]
    groups += [(f"view {name}", rows) for name, rows in summary["views"].items()]
    groups += [(f"task {task['task_id']}", task["errors"]) for task in summary["tasks"]]
    titles = [f"{row['metric']}, {row['steps']} step{'s' * (row['steps'] > 1)}" for row in summary["overall"]]
    lines = [f"{'imagined/copied':16}" + "".join(f"{title:>26}" for title in titles)]
    for name, rows in groups:
        lines.append(f"{name:16}" + "".join(f"{_cell(row):>26}" for row in rows))
    return "\n".join(lines)


def _cell(row: Mapping[str, Any]) -> str:
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
    return f"{row['imagined']:.5f}/{row['copied']:.5f} = {ratio}"


# ------------------------------------------------------------------------------------------------ picture


def write_sheet(path: Path, episodes: Sequence[Comparison], views: Sequence[str]) -> Path:
    """A PNG with a row per decision, current | executed | imagined, each in all views; labelled.

    `episodes`: one per task; the rows spread over the tasks and, within them, over the episode.
    """
    scale = max(1, -(-SHEET_SIDE // episodes[0].pictures.shape[-2]))
    side = scale * episodes[0].pictures.shape[-2]
    picks = sheet_rows([len(episode.step) for episode in episodes])
    steps = max(episodes[0].imagined)
    kinds = ("current", f"executed (+{episodes[0].offset})", f"imagined ({steps} step{'s' * (steps > 1)})")
    sheet = Image.new("RGB", (3 * len(views) * side, SHEET_BAR + len(picks) * (SHEET_BAR + side)))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=14)
    for column, kind in enumerate(kinds):
        for v, view in enumerate(views):
            draw.text(((column * len(views) + v) * side + 4, 3), kind if v == 0 else view, fill="white", font=font)
    for row, (which, n) in enumerate(picks):
        episode, top = episodes[which], SHEET_BAR + row * (SHEET_BAR + side)
        imagined, copied = episode.imagined[steps][n, :, 0].mean(), episode.copied[n, :, 0].mean()
        label = f"task {episode.task_id}, step {episode.step[n]}: mse imagined {imagined:.5f}, copied {copied:.5f}"
        label = f"{label}   {episode.instruction}"
        draw.text((4, top + 3), label, fill="white", font=font)
        tiles = episode.pictures[n].reshape(-1, *episode.pictures.shape[-3:])
        for column, tile in enumerate(tiles):
            image = Image.fromarray(tile).resize((side, side), Image.Resampling.NEAREST)
            sheet.paste(image, (column * side, top + SHEET_BAR))
    sheet.save(path, "PNG")
    return path


def sheet_rows(lengths: Sequence[int], rows: int = SHEET_ROWS) -> list[tuple[int, int]]:
    """(episode, decision) of each row, each once: as many per episode as fit, the moments of all spread evenly.

    Two episodes of 8 and 4 decisions, 4 rows: (0, 1), (0, 5), (1, 1), (1, 3).
    """
    each = max(1, rows // len(lengths))
    shares = [(k, (j + (k + 0.5) / len(lengths)) / each) for k in range(len(lengths)) for j in range(each)]
    return sorted({(k, int(lengths[k] * share)) for k, share in shares})
