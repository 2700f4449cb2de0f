"""Pretraining: the loop, what it saves and how it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learners.pretrain import STATE, learning_rate, pretrain
from learners.pretrain_config import PretrainConfig
from learners.pretrain_state import check_state
from learners.windows import Windows, make_windows
from tests.test_pretrain import TINY, demonstration
from wamrl_ray.policy.bases import load_base
from wamrl_ray.policy.wam import WAM
from wamrl_ray.types import Metrics


@pytest.fixture(scope="module")
def windows() -> Windows:
    return make_windows([demonstration(seed) for seed in range(3)], TINY.policy)


@pytest.fixture(scope="module")
def whole(windows: Windows, tmp_path_factory: pytest.TempPathFactory) -> WAM:
    """TINY trained without interruption."""
    return pretrain(TINY, windows, windows, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def noisy() -> Windows:
    return make_windows([demonstration(seed, noisy=True) for seed in range(3)], TINY.policy)


def test_the_learning_rate_warms_up_and_ends_at_its_final_share() -> None:
    config = PretrainConfig(video_steps=100, action_steps=300, lr=1e-3, warmup_steps=10, final_lr_share=0.1)
    assert learning_rate(0, config) == pytest.approx(1e-4)
    assert learning_rate(200, config) == pytest.approx(1e-3 * (0.1 + 0.9 / 2))
    assert learning_rate(400, config) == pytest.approx(1e-4)


class Killed(Exception):
    pass


def kill_at(step: int) -> Any:
    def on_metrics(at: int, metrics: Metrics) -> None:
        if at == step:
            raise Killed

    return on_metrics


def same_weights(a: WAM, b: WAM) -> bool:
    names = ("world", "actor")
    return [a.export(n).digest for n in names] == [b.export(n).digest for n in names]  # type: ignore[arg-type]


def test_a_killed_and_resumed_pretraining_ends_in_the_same_weights(
    tmp_path: Path, windows: Windows, whole: WAM
) -> None:
    with pytest.raises(Killed):
        pretrain(TINY, windows, windows, tmp_path, on_metrics=kill_at(5))
    assert check_state(tmp_path / STATE, TINY) == 4
    started: list[int] = []
    resumed = pretrain(TINY, windows, windows, tmp_path, on_start=started.append)
    assert started == [4] and same_weights(whole, resumed)
    shipped = load_base(tmp_path)
    assert torch.equal(shipped.world.proj_in.weight, resumed.world.proj_in.weight.half().float())
    untrained = WAM(TINY.policy, seed=0)
    assert not torch.equal(untrained.expert.action_proj_out.weight, resumed.expert.action_proj_out.weight)


def test_a_save_cut_short_leaves_the_earlier_state(
    tmp_path: Path, windows: Windows, whole: WAM, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain(TINY, windows, windows, tmp_path, until=2)

    def torn(state: object, file: Any) -> None:
        file.write(b"half a state")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", torn)
        with pytest.raises(Killed):
            pretrain(TINY, windows, windows, tmp_path)
    assert check_state(tmp_path / STATE, TINY) == 2
    (tmp_path / f".{STATE}.123.tmp").write_bytes(b"what a kill leaves")
    assert same_weights(pretrain(TINY, windows, windows, tmp_path), whole)
    assert not list(tmp_path.glob(".*")), "leftovers are swept up"


def test_stopping_in_between_changes_nothing(tmp_path: Path, windows: Windows, whole: WAM) -> None:
    for until in (1, 3, None):
        parts = pretrain(TINY, windows, windows, tmp_path, until=until)
    assert same_weights(parts, whole)


@pytest.mark.parametrize("damage", [lambda whole: whole[:1000], lambda whole: b"", lambda whole: b"no state at all"])
def test_a_damaged_state_is_refused_by_name(
    damage: Callable[[bytes], bytes], tmp_path: Path, windows: Windows
) -> None:
    pretrain(TINY, windows, windows, tmp_path, until=2)
    state = tmp_path / STATE
    state.write_bytes(damage(state.read_bytes()))
    with pytest.raises(ValueError, match="state.pt: is damaged or no training state; delete it"):
        check_state(state, TINY)
    with pytest.raises(ValueError, match="delete it"):
        pretrain(TINY, windows, windows, tmp_path)


def test_a_state_goes_on_only_with_the_recipe_that_made_it(tmp_path: Path, windows: Windows) -> None:
    pretrain(TINY, windows, windows, tmp_path, until=2)
    for changed, words in (
        (replace(TINY, lr=3e-3), "lr = 0.003, but .*state.pt was trained with 0.001: continue"),
        (replace(TINY, action_steps=9), "action_steps = 9, but .* with 4"),
        (replace(TINY, policy=replace(TINY.policy, imagined_offsets=(4,))), r"policy.imagined_offsets = \[4\], but"),
    ):
        with pytest.raises(ValueError, match=words):
            check_state(tmp_path / STATE, changed)
    assert check_state(tmp_path / STATE, replace(TINY, save_every=7, log_every=3, threads=2)) == 2
    with pytest.raises(ValueError, match="lr = 0.003"):
        pretrain(replace(TINY, lr=3e-3), windows, windows, tmp_path)


def test_a_state_that_does_not_tell_its_recipe_is_continued(tmp_path: Path, windows: Windows, whole: WAM) -> None:
    pretrain(TINY, windows, windows, tmp_path, until=2)
    state = torch.load(tmp_path / STATE, weights_only=True)
    del state["config"]
    torch.save(state, tmp_path / STATE)
    assert same_weights(pretrain(TINY, windows, windows, tmp_path), whole)


def test_a_start_from_a_base_keeps_its_normaliser(tmp_path: Path, windows: Windows) -> None:
    base = WAM(TINY.policy, seed=5)
    base.normalizer.action_center += 3.0
    before = base.export("world").digest
    trained = pretrain(replace(TINY, lr=1e-12), windows, windows, tmp_path, init=base, until=2)
    assert trained.normalizer.action_center.tolist() == [3.0, 3.0]
    torch.testing.assert_close(trained.world.proj_in.weight, WAM(TINY.policy, seed=5).world.proj_in.weight)
    assert trained.export("world").digest != before


def test_a_loss_that_is_not_finite_ends_the_training_and_spares_the_state(tmp_path: Path, windows: Windows) -> None:
    pretrain(TINY, windows, windows, tmp_path, until=2)
    broken = replace(windows, state=windows.state * torch.inf)
    with pytest.raises(RuntimeError, match="pretrain/action_loss is nan by step 3"):
        pretrain(TINY, broken, windows, tmp_path)
    assert check_state(tmp_path / STATE, TINY) == 2
    assert all(bool(p.isfinite().all()) for p in load_base(tmp_path).parameters())


def test_metrics_are_means_over_the_steps_since_the_last(tmp_path: Path, windows: Windows) -> None:
    each: dict[int, Metrics] = {}
    pretrain(TINY, windows, windows, tmp_path / "each", on_metrics=each.__setitem__)
    some: dict[int, Metrics] = {}
    config = replace(TINY, log_every=3, save_every=6)  # step 4 is a video step, 5 and 6 are action steps
    pretrain(config, windows, windows, tmp_path / "some", on_metrics=some.__setitem__)
    assert sorted(each) == [1, 2, 3, 4, 5, 6] and sorted(some) == [3, 6]
    mean = np.mean([each[step]["pretrain/video_loss"] for step in (1, 2, 3)])
    assert some[3]["pretrain/video_loss"] == pytest.approx(mean)
    assert some[6]["pretrain/action_loss"] == pytest.approx(
        np.mean([each[step]["pretrain/action_loss"] for step in (5, 6)])
    )
    assert "pretrain/valid_action_loss" in some[6] and "pretrain/valid_action_loss" not in some[3]
    assert some[6].keys() >= {"pretrain/grad_norm", "pretrain/lr", "time/step_s", "time/data_share"}
    assert 0 < some[6]["time/data_share"] < 1


def test_the_losses_of_a_recipe_stay_what_they_are(tmp_path: Path, noisy: Windows) -> None:
    """Taken from this very recipe: whoever changes the arithmetic of a step has to say so here."""
    rows: dict[int, Metrics] = {}
    config = replace(TINY, video_steps=3, action_steps=5, shift=1)
    pretrain(config, noisy, noisy, tmp_path, on_metrics=rows.__setitem__)
    assert rows[1]["pretrain/video_loss"] == pytest.approx(0.968679, rel=1e-4)
    assert rows[5]["pretrain/action_loss"] == pytest.approx(1.773798, rel=1e-4)
    assert rows[7]["pretrain/action_loss"] == pytest.approx(1.164458, rel=1e-3)
    assert rows[8]["pretrain/video_loss"] == pytest.approx(1.017776, rel=1e-3)


def test_pretraining_lowers_both_losses(tmp_path: Path, windows: Windows) -> None:
    rows: list[Metrics] = []
    config = replace(
        TINY, video_steps=30, action_steps=50, video_every=1000, batch_size=8, warmup_steps=5, lr=3e-3, save_every=200
    )
    pretrain(config, windows, windows, tmp_path, on_metrics=lambda _, m: rows.append(m))

    def mean(name: str, part: slice) -> float:
        return float(np.mean([row[name] for row in rows[part]]))

    assert mean("pretrain/video_loss", slice(25, 30)) < 0.7 * mean("pretrain/video_loss", slice(0, 3))
    assert mean("pretrain/action_loss", slice(-8, None)) < 0.9 * mean("pretrain/action_loss", slice(30, 36))
