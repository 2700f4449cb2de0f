"""The reconstruction reward: hand values, and what must not pay."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from wamrl_ray.rewards.pixel import PixelReward
from wamrl_ray.rewards.reconstruction import RewardConfig, decision_rewards, shape

PROGRESS = RewardConfig()


def frames(value: float, *lead: int) -> Tensor:
    return torch.full((*lead, 1, 4, 4, 3), value)


def scene(position: int, *lead: int) -> Tensor:
    """A white square on black, at one of several places."""
    image = torch.zeros(*lead, 1, 8, 8, 3)
    image[..., 0, position : position + 2, 2:4, :] = 1.0
    return image


def reward_of(imagined: Tensor, executed: Tensor, now: Tensor, config: RewardConfig = PROGRESS) -> float:
    reached = torch.ones(imagined.shape[:2], dtype=torch.bool)
    return float(decision_rewards(PixelReward(), imagined, executed, now, reached, config))


def test_pixel_distance_is_the_mean_squared_error_per_sample() -> None:
    a, b = torch.cat([frames(0.0, 1), frames(0.5, 1)]), torch.cat([frames(1.0, 1), frames(0.5, 1)])
    assert PixelReward().distance(a, b).tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="equal shapes"):
        PixelReward().distance(a, a[:, :, :2])


def test_progress_by_hand() -> None:
    d = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.9, 0.5, 0.3])
    still = torch.tensor([0.2, 0.2, 0.2, 0.2, 0.2, 0.0, 0.2])
    moved = torch.tensor([0.2, 0.1, 0.0, 0.1, 0.2, 0.5, 0.4])
    assert shape(d, still, moved, PROGRESS).tolist() == pytest.approx([1.0, 0.5, 0.0, -0.5, -1.0, 0.0, 0.25])


def test_negative_and_exp_by_hand() -> None:
    d, one = torch.tensor([0.0, 0.02]), torch.ones(2)
    assert shape(d, one, one, RewardConfig(shaping="negative")).tolist() == pytest.approx([0.0, -0.02])
    assert shape(d, one, one, RewardConfig(shaping="exp", tau=0.01)).tolist() == pytest.approx([1.0, math.exp(-2.0)])


def test_standing_still_earns_nothing() -> None:
    now = scene(0, 1)
    assert reward_of(scene(4, 1, 1), now[:, None], now) == 0.0


def test_doing_what_was_imagined_earns_one() -> None:
    assert reward_of(scene(4, 1, 1), scene(4, 1, 1), scene(0, 1)) == 1.0


def test_a_timid_imagination_still_pays_for_moving_its_way() -> None:
    """The world model imagines a third of the motion, as a mean of what may happen does; going all the way is right."""
    now, goal = scene(0, 1), scene(4, 1, 1)
    timid = now[:, None] + (goal - now[:, None]) / 3
    right, wrong = reward_of(timid, goal, now), reward_of(timid, scene(2, 1, 1), now)
    assert right == pytest.approx(1 - (2 / 3) ** 2, abs=1e-5)
    assert reward_of(timid, now[:, None], now) == 0.0
    assert wrong < 0.5 * right  # not less than 0: that the square leaves its place was imagined too


def test_ignoring_the_action_earns_no_more_than_standing_still() -> None:
    """Movement that has nothing to do with what was imagined: somewhere else, or at random."""
    assert reward_of(scene(4, 1, 1), scene(2, 1, 1), scene(0, 1)) <= 0.0
    noise = torch.rand(200, 1, 1, 8, 8, 3, generator=torch.Generator().manual_seed(0))
    reached = torch.ones(200, 1, dtype=torch.bool)
    rewards = decision_rewards(PixelReward(), scene(4, 200, 1), noise, scene(0, 200), reached, PROGRESS)
    assert float(rewards.mean()) < 0.01 and float(rewards.max()) < 0.2


def test_imagining_nothing_and_doing_nothing_earns_nothing() -> None:
    """The hole of a bare negative distance, which pays its maximum here."""
    now = scene(0, 1)
    assert reward_of(now[:, None], now[:, None], now) == 0.0
    assert reward_of(now[:, None] + 1e-3, scene(4, 1, 1), now) == 0.0  # imagined less than epsilon: not judged
    negative = RewardConfig(shaping="negative")
    trying = reward_of(scene(4, 1, 1), scene(3, 1, 1), now, negative)
    assert reward_of(now[:, None], now[:, None], now, negative) == 0.0 > trying


def test_offsets_that_were_not_reached_do_not_count() -> None:
    imagined = torch.cat([scene(4, 3, 1), scene(6, 3, 1)], dim=1)
    executed = torch.cat([scene(4, 3, 1), torch.full((3, 1, 1, 8, 8, 3), math.nan)], dim=1)
    executed[0, 1] = scene(0)
    reached = torch.tensor([[True, True], [True, False], [False, False]])
    rewards = decision_rewards(PixelReward(), imagined, executed, scene(0, 3), reached, PROGRESS)
    assert rewards.tolist() == [0.5, 1.0, 0.0]


def test_swapped_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="expected"):
        decision_rewards(
            PixelReward(), scene(0, 2, 3), scene(0, 2, 3), scene(0, 3), torch.ones(2, 3, dtype=torch.bool), PROGRESS
        )


def test_a_reward_that_pays_for_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reward\.success_weight = 0: nothing is paid for"):
        RewardConfig(weight=0.0, success_weight=0.0)


@pytest.mark.parametrize("wrong", [{"epsilon": 0.0}, {"tau": -1.0}, {"weight": -1.0}, {"imagine_steps": 0}])
def test_a_wrong_reward_config_names_field_and_value(wrong: dict[str, float]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=rf"reward\.{name} = {value}"):
        RewardConfig(**wrong)  # type: ignore[arg-type]
