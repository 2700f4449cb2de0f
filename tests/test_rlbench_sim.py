"""RLBench on CoppeliaSim itself: runs where both are installed, and says elsewhere what is missing.

The only tests that show more than that the adapter keeps its contract.
"""

from __future__ import annotations

import numpy as np
import pytest

from envs import rlbench_install
from envs.rlbench import RLBenchConfig, RLBenchEnv
from envs.rlbench_supervisor import History

pytestmark = [pytest.mark.rlbench_sim, pytest.mark.timeout(1800)]

HOME = (0, 0.175, 0, -0.8729, 0, 1.2216, 0.7854)
RESTARTS = 4


def test_it_starts_steps_draws_and_restarts() -> None:
    lacking = rlbench_install.missing()
    if lacking:
        pytest.skip("RLBench cannot run here: " + "; ".join(lacking))
    env = RLBenchEnv(RLBenchConfig(resolution=128), "train", History())
    for init_state_id in range(3):
        observation = env.reset_to(0, init_state_id, seed=0)
        assert observation.frames.std(axis=(1, 2, 3)).min() > 1
        assert np.allclose(observation.state[:7], HOME, atol=0.05)
    actions = np.zeros((50, 8), np.float32)
    actions[:, 0], actions[:, 7] = 0.2, 1.0
    chunk = env.step_chunk(actions, capture_at=(25, 50))
    assert chunk.steps == 50 and np.isfinite(chunk.states).all()
    assert chunk.states[-1, 0] > 0.2, "the arm turns at about 0.2 rad/s"
    assert not np.array_equal(chunk.captures[25].frames, chunk.captures[50].frames)
    for init_state_id in range(RESTARTS):
        env.close()
        env.reset_to(0, init_state_id, seed=0)
    process = env._simulator.process
    assert process is not None
    env.close()
    assert process.ended and env.counts["launches"] == 1 + RESTARTS
