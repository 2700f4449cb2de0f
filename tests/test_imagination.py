"""Imagination measured: hand values on a policy that moves by a known share, and the command on `reach`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from wamrl_ray.__main__ import WRONG_USAGE, main
from wamrl_ray.imagination import Comparison, compare, last_executed_offset, sheet_rows, summarise, table, write_sheet
from wamrl_ray.policy.bases import save_base
from wamrl_ray.policy.wam import WAM, WAMConfig
from wamrl_ray.types import Demonstration, PolicySpec

SPEC = PolicySpec(
    horizon=8, executed=4, action_dim=1, state_dim=1, channels=2, views=("a", "b"), resolution=4, memory=2,
    imagined_offsets=(2, 4, 8),
)  # fmt: skip
PER_STEP = np.array([5, 10])
"grey levels that the two views of `steady` brighten by in an env step"


class Foresight:
    """Imagines `share[steps]` of the brightening that `steady` shows; remembers what it was shown."""

    spec = SPEC

    def __init__(self, share: dict[int, float]) -> None:
        self.share = share
        self.seen: list[list[int]] = []
        self.seeds: list[int] = []

    def encode(self, frames: torch.Tensor, instructions: list[str]) -> torch.Tensor:
        assert len(instructions) == len(frames)
        self.seen = frames[:, :, 0, 0, 0, 0].tolist()
        return frames

    def imagine(self, obs: torch.Tensor, seeds: list[int], steps: int) -> torch.Tensor:
        self.seeds = seeds
        ahead = torch.tensor(SPEC.imagined_offsets)[:, None] * torch.from_numpy(PER_STEP)
        return (obs[:, -1:].float() + self.share[steps] * ahead[None, :, :, None, None, None]) / 255.0

    def round_trip(self, frames: torch.Tensor) -> torch.Tensor:
        return frames.float() / 255.0


def steady(length: int, task_id: int = 0, captured: int = 4) -> Demonstration:
    """Both views brighten evenly, captured every `captured` of `length` env steps."""
    obs_step = np.arange(0, length + 1, captured, dtype=np.int32)
    grey = (obs_step[:, None] * PER_STEP)[..., None, None, None]
    return Demonstration(
        env="steady", simulator="none", task_id=task_id, init_state_id=task_id, seed=1, instruction=f"task {task_id}",
        success=True, frames=np.broadcast_to(grey, (len(obs_step), 2, 4, 4, 3)).astype(np.uint8), obs_step=obs_step,
        state=np.zeros((length + 1, 1), np.float32), action=np.zeros((length, 1), np.float32),
        label=np.zeros((length, 1), np.float32),
    )  # fmt: skip


def compared(policy: Any, demo: Demonstration, steps: tuple[int, ...] = (1, 4)) -> Comparison:
    comparison = compare(policy, demo, steps)
    assert comparison is not None
    return comparison


def rows(summary: list[dict[str, Any]]) -> dict[tuple[str, int], tuple[float, float, float]]:
    return {(row["metric"], row["steps"]): (row["imagined"], row["copied"], row["ratio"]) for row in summary}


def test_a_copy_has_the_ratio_one_and_the_truth_has_zero() -> None:
    summary = summarise([compared(Foresight({1: 0.0, 4: 1.0}), steady(11))], SPEC.views)
    for part in (summary["overall"], summary["views"]["a"], summary["views"]["b"], summary["tasks"][0]["errors"]):
        assert {key: ratio for key, (_, _, ratio) in rows(part).items()} == {
            ("mse", 1): 1.0, ("mse", 4): 0.0, ("mae", 1): 1.0, ("mae", 4): 0.0,
        }  # fmt: skip


def test_errors_have_their_hand_values_per_view_per_task_and_overall() -> None:
    policy = Foresight({1: 0.0, 4: 0.75})
    summary = summarise([compared(policy, steady(11)), compared(policy, steady(6, task_id=3))], SPEC.views)
    # In 4 env steps the views brighten by 20 and 40 of 255; a quarter of it is missing at 4 denoising steps.
    a, b = 20 / 255, 40 / 255
    expected = {"a": (a**2, a), "b": (b**2, b)}
    for view, (mse, mae) in expected.items():
        found = rows(summary["views"][view])
        assert found[("mse", 4)] == pytest.approx((mse / 16, mse, 1 / 16))
        assert found[("mae", 4)] == pytest.approx((mae / 4, mae, 1 / 4))
    assert rows(summary["overall"])[("mse", 1)] == pytest.approx(((a**2 + b**2) / 2, (a**2 + b**2) / 2, 1.0))
    assert [(task["task_id"], task["decisions"]) for task in summary["tasks"]] == [(0, 2), (3, 1)]
    assert summary["decisions"] == 3
    assert f"{a / 4:.5f}/{a:.5f} = 0.250" in table(summary)


def test_only_decisions_whose_future_frame_exists_count_and_memory_starts_with_repeats() -> None:
    policy = Foresight({4: 1.0})
    comparison = compared(policy, steady(11, captured=2), (4,))
    assert comparison.step.tolist() == [0, 4], "the frame after 12 env steps was never drawn"
    assert policy.seen == [[0, 0], [0, 4 * 5]]
    assert comparison.pictures[1, :, 0, 0, 0, 0].tolist() == [20, 40, 40]
    assert compare(policy, steady(3, captured=2), (4,)) is None
    with pytest.raises(ValueError, match="capture at every 4"):
        compare(policy, steady(11, captured=3), (4,))


def test_the_noise_is_the_episodes_own() -> None:
    policy, seeds = Foresight({4: 1.0}), []
    for demo in (steady(11), steady(11), replace(steady(11), seed=2), replace(steady(11), init_state_id=9)):
        compare(policy, demo, (4,))
        seeds.append(tuple(policy.seeds))
    assert seeds[0] == seeds[1] and len(set(seeds)) == 3 and len(set(seeds[0])) == 2


def test_where_nothing_moves_there_is_no_ratio() -> None:
    still = replace(steady(6), frames=np.zeros((2, 2, 4, 4, 3), np.uint8))
    summary = summarise([compared(Foresight({4: 1.0}), still, (4,))], SPEC.views)
    assert summary["overall"][0]["ratio"] is None and "= -" in table(summary)


def test_the_compared_offset_is_the_last_that_is_executed() -> None:
    assert last_executed_offset(SPEC) == 4
    with pytest.raises(ValueError, match=r"\(8,\).*4 executed"):
        last_executed_offset(replace(SPEC, imagined_offsets=(8,)))


def test_a_sheet_shows_current_executed_and_imagined_of_different_tasks(tmp_path: Path) -> None:
    assert sheet_rows([8, 4], rows=4) == [(0, 1), (0, 5), (1, 1), (1, 3)]
    assert sheet_rows([1, 2], rows=10) == [(0, 0), (1, 0), (1, 1)], "each decision once"
    assert sheet_rows([3] * 12) == [(k, int(3 * (k + 0.5) / 12)) for k in range(12)]
    episodes = [compared(Foresight({4: 0.5}), steady(11, task_id=task), (4,)) for task in range(10)]
    image = np.asarray(Image.open(write_sheet(tmp_path / "sheet.png", episodes, SPEC.views)))
    assert image.shape == (24 + 10 * (24 + 192), 6 * 192, 3)
    # Row 9 is task 9's second decision, 4 env steps in: current a, b | executed a, b | imagined a, b.
    assert image[-1, 96::192, 0].tolist() == [20, 40, 40, 80, 30, 60]
    assert image[:24].max() == 255, "the columns are labelled"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained policy of `reach`'s sizes: it imagines that nothing moves."""
    folder = tmp_path_factory.mktemp("base")
    save_base(WAM(WAMConfig.debug(), seed=0), folder)
    return str(folder)


def test_the_command_writes_the_same_figures_twice(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = []
    for name in ("one", "two"):
        out = tmp_path / f"{name}.json"
        asked = ["--checkpoint", base, "--env", "reach", "--imagination", "--imagine-steps", "4", "--json", str(out)]
        assert main(["eval", *asked]) == 0
        results.append(json.loads(out.read_text()))
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
        del results[-1]["wall_s"]
    result = results[0]
    assert result == results[1]
    assert result["split"] == "held_out" and result["episodes"] == 4 == result["expert_successes"]
    assert [task["task_id"] for task in result["tasks"]] == [0, 1] and result["decisions"] >= 4
    assert {row["steps"] for row in result["overall"]} == {1, 4}
    assert all(row["ratio"] == pytest.approx(1.0, abs=1e-3) and row["copied"] > 0 for row in result["overall"])
    printed = capsys.readouterr().out
    assert all(part in printed for part in ("overall", "view top", "task 1", "4 expert episodes (4 successes)"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--episodes", "1"], "--json is missing"),
        (["--json", "out.json"], "--episodes is missing"),
        (["--episodes", "1", "--json", "out.json", "--imagine-steps", "2"], "goes with --imagination only"),
        (["--imagination", "--workers", "2"], "--workers 2: --imagination runs in this process alone"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "--checkpoint", "tiny_reach", "--env", "reach", *options]) == WRONG_USAGE
    assert message in capsys.readouterr().err
