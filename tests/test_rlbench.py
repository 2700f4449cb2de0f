"""The RLBench adapter on a fake RLBench: units, seeds, rendering, retries, renewal, and what a machine must have.

The suite of all environments (`test_envs.py`) runs on it too; faults are in `test_rlbench_faults.py`.  What these tests
can show is that the adapter keeps our contract; that it runs on CoppeliaSim, only `test_rlbench_sim.py` can.
"""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs import rlbench_install, rlbench_supervisor
from envs.rlbench import RLBenchConfig, RLBenchEnv, SimulatorFault
from envs.rlbench_supervisor import History
from tests.rlbench_fake import Machine, install
from wamrl_ray.__main__ import WRONG_USAGE
from wamrl_ray.preflight import env_config
from wamrl_ray.types import Split

HOME = np.array([0, 0.175, 0, -0.8729, 0, 1.2216, 0.7854], np.float32)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with pytest.MonkeyPatch.context() as patch:
        yield install(patch, tmp_path_factory.mktemp("machine"))


@pytest.fixture
def make(machine: Machine) -> Iterator[Any]:
    """Environments that are closed at the end, with a history of their own."""
    machine.plan()
    built: list[RLBenchEnv] = []

    def build(split: Split = "train", **values: Any) -> RLBenchEnv:
        env = RLBenchEnv(RLBenchConfig(backoff_s=0.0, **values), split, History())
        built.append(env)
        return env

    yield build
    for env in built:
        env.close()
    assert machine.all_gone()


def towards(pot: float) -> np.ndarray:
    """The action (8,) that turns the first joint to the pot at full speed, gripper open."""
    return np.array([np.sign(pot), 0, 0, 0, 0, 0, 0, 1], np.float32)


def pot_of(init_state_id: int) -> float:
    """Where the fake places the pot: its draws from the global generator, seeded with the initial state."""
    drawn = np.random.RandomState(init_state_id)
    return float(drawn.choice([-1, 1]) * drawn.uniform(0.2, 0.6))


# ------------------------------------------------------------------------------------------------ contract


@pytest.mark.parametrize("arm", ["joint_velocity", "joint_position"])
def test_an_action_is_a_velocity_in_both_arm_modes_and_success_ends_the_episode(make: Any, arm: str) -> None:
    env = make(arm=arm, max_joint_velocity=0.8)
    observation = env.reset_to(0, 4, seed=1)
    assert np.allclose(observation.state, [*HOME, 0.28, 0.175, 1.47, 1.0])
    pot = pot_of(4)
    chunk = env.step_chunk(np.tile(towards(pot), (30, 1)), capture_at=())
    # Within 0.05 rad of the pot, at 0.8 rad/s and 50 ms a step.
    assert chunk.steps == int(np.floor((abs(pot) - 0.05) / 0.04)) + 1
    assert (chunk.reward, chunk.success, chunk.terminated, chunk.truncated) == (1.0, True, True, False)
    assert np.allclose(chunk.states[:, 0], np.sign(pot) * 0.04 * np.arange(1, chunk.steps + 1), atol=1e-6)
    assert chunk.info == {"reset_attempts": 1.0, "poured": 1.0, "success_without_pour": 0.0}
    assert env.counts["episodes"] == 1


def test_actions_beyond_one_are_clipped_and_the_last_one_is_the_gripper(make: Any) -> None:
    env = make()
    env.reset_to(0, 0, seed=0)
    actions = np.zeros((3, 8), np.float32)
    actions[0, 3], actions[0, 7], actions[1, 7], actions[2, 7] = 5.0, 0.2, -0.2, 0.0
    states = env.step_chunk(actions, capture_at=()).states
    assert np.isclose(states[0, 3], HOME[3] + 0.05)
    assert states[:, 10].tolist() == [1.0, 0.0, 0.0]


def test_success_without_pouring_is_told_apart(make: Any, machine: Machine) -> None:
    machine.plan(can_over_pot=True)
    env = make()
    assert env.reset(seed=0)[1]["poured"] == 0.0
    chunk = env.step_chunk(np.zeros((3, 8), np.float32), capture_at=())
    assert (chunk.steps, chunk.success, chunk.terminated) == (1, True, True)
    assert (chunk.info["poured"], chunk.info["success_without_pour"]) == (0.0, 1.0)


def test_cameras_are_drawn_only_where_asked_and_only_those_that_are_read(make: Any, machine: Machine) -> None:
    machine.plan(count_renders=True)
    env = make(views=("overhead", "wrist", "front"), resolution=32)
    first = env.reset_to(0, 3, seed=0)
    assert machine.renders() == 3
    chunk = env.step_chunk(np.tile(towards(-pot_of(3)), (6, 1)), capture_at=(2, 6))
    assert machine.renders() == 9 and sorted(chunk.captures) == [2, 6]
    # In the order of the config: the fake's cameras differ in brightness, by their names in the alphabet.
    backgrounds = [int(np.median(view)) for view in first.frames]
    assert backgrounds == [40 + 20 * 2, 40 + 20 * 4, 40]
    assert not np.array_equal(chunk.captures[2].frames, chunk.captures[6].frames)


def test_the_initial_state_places_the_task_whatever_the_seed(make: Any) -> None:
    env = make()
    starts = [env.reset_to(0, init, seed).frames.tobytes() for init, seed in ((1, 0), (1, 9), (2, 0))]
    assert starts[0] == starts[1] != starts[2]


def test_what_is_random_after_the_start_is_a_function_of_the_seed(make: Any) -> None:
    env, ends = make(), []
    for seed in (0, 1, 0):
        env.reset_to(0, 4, seed)
        steps = int(np.floor((abs(pot_of(4)) - 0.05) / 0.05)) + 1
        chunk = env.step_chunk(np.tile(towards(pot_of(4)), (steps, 1)), capture_at=(steps,))
        assert chunk.success
        ends.append(chunk.captures[steps].frames.tobytes())
    assert ends[0] == ends[2] != ends[1]


def test_a_task_gives_the_environment_its_name_and_instruction(make: Any) -> None:
    spec = make(instruction="water it").env_spec
    assert (spec.name, spec.instructions) == ("rlbench_water_plants", ("water it",))
    assert spec.simulator == "coppeliasim 4.1.0, rlbench" and (spec.state_dim, spec.action_dim) == (11, 8)
    assert make().env_spec.instructions == ("water the plant",)
    assert make(task="CloseJar").env_spec.instructions == ("close jar",)
    assert RLBenchConfig(task="PutUSBIn3Boxes").words == ["put", "usb", "in", "3", "boxes"]
    assert env_config("rlbench_water_plants", 32) == RLBenchConfig(resolution=32)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("task", "water_plants"), ("views", ("agent",)), ("views", ()), ("views", ("front", "front")),
        ("arm", "end_effector"), ("resolution", 8), ("max_steps", 0), ("recycle_after", 0), ("variation", -1),
        ("max_restarts", -1), ("backoff_s", -0.1), ("max_joint_velocity", 0.0), ("launch_s", 0.0), ("step_s", -1.0),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} = "):
        RLBenchConfig(**{name: value})


# ------------------------------------------------------------------------------------------------ process


def test_the_simulator_has_an_interpreter_of_its_own_clean_and_without_torch(
    make: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/conda/lib")
    monkeypatch.setenv("QT_QPA_PLATFORM", "offscreen")
    monkeypatch.setenv("DISPLAY", ":77")
    env = make()
    env.reset_to(0, 0, seed=0)
    programs = {" ".join(process.cmdline()): process for process in machine.processes()}
    (simulator,) = (process for line, process in programs.items() if "envs.rlbench_child" in line)
    (keeper,) = (process for line, process in programs.items() if "envs.rlbench_keeper" in line)
    found, root = simulator.environ(), str(machine.root)
    assert (found["LD_LIBRARY_PATH"], found["QT_QPA_PLATFORM_PLUGIN_PATH"]) == (root, root)
    assert found["DISPLAY"] == f":{env._simulator.process.display}" != ":77" and "QT_QPA_PLATFORM" not in found
    for process in (simulator, keeper):
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "torch" not in maps and ("numpy" in maps) == (process is simulator)
    assert len(programs) == 3, "keeper, display, simulator"


def test_a_placement_that_fails_is_tried_again_and_counted(make: Any, machine: Machine) -> None:
    machine.plan(refused_resets=2)
    env = make()
    _, info = env.reset(seed=0)
    assert info["reset_attempts"] == 3
    machine.plan(refused_resets=3)
    with pytest.raises(
        SimulatorFault, match=r"(?s)exceptions\.TaskEnvironmentError in reset: .*BoundaryError"
    ) as caught:
        env.reset_to(0, 0, seed=0)
    assert caught.value.kind == "reset_failed" and machine.all_gone()
    machine.plan()
    env.reset_to(0, 0, seed=0)
    assert env.counts["launches"] == 2


def test_a_simulator_is_renewed_when_it_is_old_or_large(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env = make(recycle_after=2)

    def pid_at_reset() -> int:
        env.reset_to(0, 0, seed=0)
        return int(env._simulator.process.pid)

    first, second, third = pid_at_reset(), pid_at_reset(), pid_at_reset()
    assert first == second != third and env.counts["recycled"] == 1
    monkeypatch.setattr(rlbench_supervisor, "MAX_RSS_BYTES", 1 << 20)
    assert pid_at_reset() != third
    assert env.counts == {"launches": 3, "recycled": 2}


def test_closing_twice_is_fine_and_a_reset_brings_it_back(make: Any, machine: Machine) -> None:
    env = make()
    env.reset_to(0, 0, seed=0)
    env.close()
    env.close()
    assert machine.all_gone()
    env.reset_to(0, 0, seed=0)
    assert env.counts["launches"] == 2


def test_a_fault_travels_between_processes() -> None:
    fault = pickle.loads(pickle.dumps(SimulatorFault("crashed", "by SIGSEGV")))
    assert (fault.kind, str(fault)) == ("crashed", "simulator fault crashed: by SIGSEGV")


# ------------------------------------------------------------------------------------------------ installation


def named(line: str) -> str:
    """What a line of `missing` is about."""
    assert ": " in line, "what: remedy"
    return line.split()[0]


def test_a_bare_machine_is_told_everything_in_one_message_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COPPELIASIM_ROOT", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "path", [])
    assert [named(line) for line in rlbench_install.missing()] == ["COPPELIASIM_ROOT", "Xvfb", "pyrep", "rlbench"]
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"COPPELIASIM_ROOT is not set.*apt-get install xvfb.*pyrep.*rlbench is not"):
        RLBenchEnv(RLBenchConfig(), "train")
    assert time.monotonic() - began < 1


def test_each_missing_part_is_seen(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert rlbench_install.missing() == []
    for folder, said in (
        ("empty", "holds no libcoppeliaSim.so"),
        ("CoppeliaSim_Edu_V4_6_0_rev18", "is CoppeliaSim 4.6"),
    ):
        (tmp_path / folder).mkdir()
        if folder != "empty":
            (tmp_path / folder / "libcoppeliaSim.so").touch()
        with monkeypatch.context() as patch:
            patch.setenv("COPPELIASIM_ROOT", str(tmp_path / folder))
            (line,) = rlbench_install.missing()
            assert said in line and "4.1.0" in line.partition(": ")[2]
    # Another project of that name, and an RLBench from before the present action modes: found first on the path.
    for package, said in (("pyrep", "another project"), ("rlbench", "too old")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path))
            (line,) = rlbench_install.missing()
            assert line.startswith(f"{package} is ") and said in line
        shutil.rmtree(tmp_path / package)
    with monkeypatch.context() as patch:
        patch.setattr(rlbench_install, "_RLBENCH_NEEDS", ("numpy", "no_such_package"))
        (line,) = rlbench_install.missing()
        assert line.startswith("rlbench needs no_such_package: ")


def test_training_without_rlbench_ends_with_that_message_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from wamrl_ray.__main__ import main\n"
        f"code = main(['train', '--config', 'water_plants_rlbench', '--run-dir', {str(tmp_path / 'run')!r}])\n"
        "print(code, 'diffusers' in sys.modules, 'ray' in sys.modules)"
    )
    env = {"PATH": "/nowhere", "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == [str(WRONG_USAGE), "False", "False"], done.stderr
    (line,) = done.stderr.splitlines()
    assert "COPPELIASIM_ROOT is not set: " in line and "Xvfb is not on PATH" in line
    assert not (tmp_path / "run").exists()
