"""A point that must reach the disc it is told to: a world without simulator, small enough to learn in a minute.

Fed by rollout, feeds observations, as every `ChunkEnv`.  The discs are seen only in the image and the right one is
named only in the instruction, so a policy must use both; touching the wrong one ends the episode without success.
Used by the debug preset and by the tests of the whole loop.

    image, row 0 is y = +1        state  the point's position (2,), units of the arena, which is [-1, 1] x [-1, 1]
    red disc, blue disc, white    action displacement (2,) in units of `speed`, clipped to [-1, 1]
    point on grey                 reward 1 at the step that reaches the named disc
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from envs.base import ChunkEnv
from wamrl_ray.types import EnvSpec, Frames, Split

Vector = NDArray[np.float64]

COLOURS = (("red", (220, 60, 50)), ("blue", (60, 90, 230)))
BACKGROUND, AGENT = (96, 96, 96), (255, 255, 255)
INIT_STATES: dict[Split, range] = {"train": range(0, 800), "held_out": range(800, 1000)}


@dataclass(frozen=True, kw_only=True)
class ReachConfig:
    """Lengths are in units of the arena, whose half side is 1."""

    kind: Literal["reach"] = "reach"
    resolution: int = 32
    "pixels, h = w"
    max_steps: int = 32
    "env steps until truncation; the straight way takes 7 on average, 13 at most"
    speed: float = 0.12
    "displacement of a full action"
    radius: float = 0.2
    "of a disc; the point has reached it when it is inside"

    def __post_init__(self) -> None:
        if self.resolution < 8:
            raise ValueError(f"resolution = {self.resolution} pixels is too small to see the discs: use at least 8")
        if self.max_steps < 1:
            raise ValueError(f"max_steps = {self.max_steps} must be at least 1")
        if not 0 < self.speed <= 0.5:
            raise ValueError(f"speed = {self.speed} must lie in (0, 0.5], else the point jumps over a disc")
        if not 0 < self.radius <= 0.25:
            raise ValueError(f"radius = {self.radius} must lie in (0, 0.25], else two discs and a start do not fit")


class ReachEnv(ChunkEnv):
    """Task 0 is red, task 1 is blue; an initial state is a start and both discs, the same for the two tasks."""

    def __init__(self, config: ReachConfig, split: Split) -> None:
        spec = EnvSpec(
            name="reach",
            simulator="numpy",
            instructions=tuple(f"go to the {name} disc" for name, _ in COLOURS),
            views=("top",),
            resolution=config.resolution,
            state_dim=2,
            action_dim=2,
            max_steps=config.max_steps,
            init_states=INIT_STATES,
        )
        super().__init__(spec, split)
        self._config = config
        # Pixel centres in arena units, x to the right, y up.
        centres = (np.arange(config.resolution) + 0.5) * 2 / config.resolution - 1
        self._x, self._y = centres[None, :], -centres[:, None]

    def _reset(self, task_id: int, init_state_id: int, seed: int) -> None:
        """The world has no randomness of its own: `seed` changes nothing."""
        self._goal = task_id
        self._point, self._discs = layout(init_state_id, self._config.radius)
        self._still = np.tile(np.asarray(BACKGROUND, np.float64), (*np.broadcast_shapes(self._x.shape, self._y.shape), 1))
        for disc, (_, colour) in zip(self._discs, COLOURS, strict=True):
            self._draw(self._still, disc, self._config.radius, colour)

    def _step(self, action: NDArray[np.float32], capture: bool) -> tuple[float, bool, bool]:
        move = self._config.speed * np.clip(action.astype(np.float64), -1, 1)
        self._point = np.clip(self._point + move, -1, 1)
        inside = np.linalg.norm(self._discs - self._point, axis=1) < self._config.radius
        success = bool(inside[self._goal])
        return float(success), success, bool(inside.any())

    def _frames(self) -> Frames:
        image = self._still.copy()
        self._draw(image, self._point, 0.1, AGENT)
        return image.round().astype(np.uint8)[None]

    def _draw(self, image: Vector, centre: Vector, radius: float, colour: tuple[int, int, int]) -> None:
        """Blend a disc in; its edge is one pixel wide, so that the image tells positions finer than a pixel."""
        distance = np.hypot(self._x - centre[0], self._y - centre[1])
        cover = np.clip((radius - distance) * self._config.resolution / 2 + 0.5, 0, 1)[..., None]
        image[...] = (1 - cover) * image + cover * np.asarray(colour)

    def _state(self) -> NDArray[np.float32]:
        return self._point.astype(np.float32)


def layout(init_state_id: int, radius: float) -> tuple[Vector, Vector]:
    """Start (2,) and disc centres (2, 2) of an initial state, arena units; a function of its arguments.

    The discs lie at least 0.6 from the start and neither is on the straight way to the other.
    """
    generator = np.random.default_rng(init_state_id)
    while True:
        start, red, blue = generator.uniform(-1 + radius, 1 - radius, (3, 2))
        far = min(np.linalg.norm(red - start), np.linalg.norm(blue - start)) >= 0.6
        if far and _off_the_way(start, red, blue) > 1.5 * radius and _off_the_way(start, blue, red) > 1.5 * radius:
            return start, np.stack([red, blue])


def _off_the_way(start: Vector, goal: Vector, other: Vector) -> float:
    """Distance of `other` from the segment start..goal."""
    along = np.clip(np.dot(other - start, goal - start) / np.dot(goal - start, goal - start), 0, 1)
    return float(np.linalg.norm(other - start - along * (goal - start)))
