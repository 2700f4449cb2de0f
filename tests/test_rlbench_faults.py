"""The RLBench adapter when the simulator fails: every fault is named, counted and over.

The faults are made by the fake RLBench (`tests/fake_rlbench/rlbench/plan.py`) inside a real process, killed for real.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ResetNeeded

from envs import rlbench_supervisor
from envs.rlbench import RLBenchConfig, RLBenchEnv, SimulatorFault
from envs.rlbench_supervisor import History
from tests.fakes import pair, ticket
from tests.rlbench_fake import (
    DEADLINE_S,
    DEATH_S,
    LAUNCH_S,
    STILL,
    Machine,
    build,
    install,
    left_behind,
    run_episode,
)
from wamrl_ray.cluster_actors import RolloutWorker
from wamrl_ray.config import Config
from wamrl_ray.types import Decision, PolicySpec


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with pytest.MonkeyPatch.context() as patch:
        yield install(patch, tmp_path_factory.mktemp("machine"))


@pytest.fixture
def env(machine: Machine) -> Iterator[RLBenchEnv]:
    machine.plan()
    env = build()
    yield env
    env.close()
    assert machine.all_gone()


# ------------------------------------------------------------------------------------------------ each fault

FAULTS = [
    ("step_hang", "step_timeout", "no answer to step within 0.4 s"),
    ("step_hang_with_the_lock", "step_timeout", "no answer to step"),
    ("step_shout", "step_timeout", "(?s)no answer to step.*last output:\n.*xxxx"),
    ("step_crash", "crashed", "simulator ended during step by SIGSEGV"),
    ("step_exit", "crashed", "simulator ended during step with exit code 3"),
    ("step_error", "step_failed", r"(?s)ValueError in step: deliberate, in step.*Traceback.*in strike"),
    ("step_nan", "step_failed", "the simulation has diverged"),
    ("step_garbage", "bad_message", "b'TRAC' where a message should begin"),
    ("step_oversized", "bad_message", "a message of 2147483648 bytes is announced"),
    ("step_not_json", "bad_message", "is not JSON"),
    ("step_twice", "bad_message", "'n': 0, .* is no answer to step number"),
    ("step_display", "display_failed", "display ended during step by SIGKILL"),
    ("reset_hang", "reset_timeout", "no answer to reset within 0.4 s"),
    ("reset_hang_with_the_lock", "reset_timeout", "no answer to reset"),
    ("reset_crash", "crashed", "simulator ended during reset by SIGSEGV"),
    ("reset_error", "reset_failed", r"(?s)ValueError in reset: deliberate, in reset.*Traceback.*in strike"),
    ("reset_garbage", "bad_message", "in answer to reset"),
    ("black", "black_frames", "view 0 is one colour"),
    ("launch_crash", "crashed", "simulator ended during launch by SIGSEGV"),
    ("launch_error", "launch_failed", r"(?s)ValueError in launch.*Traceback.*in strike"),
]


@pytest.mark.parametrize(("fault", "kind", "message"), FAULTS, ids=[fault for fault, _, _ in FAULTS])
def test_a_fault_is_named_and_counted_and_the_next_reset_finds_a_new_simulator(
    env: RLBenchEnv, machine: Machine, fault: str, kind: str, message: str
) -> None:
    if not fault.startswith("launch"):
        run_episode(env)  # so that the launch is not within the time measured
    machine.plan(fault=fault)
    began = time.monotonic()
    with pytest.raises(SimulatorFault, match=message) as caught:
        env.reset_to(0, 1, seed=0)
        env.step_chunk(STILL, capture_at=(1,))
    limit = LAUNCH_S if fault.startswith("launch") else DEADLINE_S
    assert time.monotonic() - began < limit + DEATH_S
    assert caught.value.kind == kind and env.counts[kind] == 1
    if fault.partition("_")[2] in ("hang", "crash", "error"):
        told = str(caught.value)
        assert "last output:\n" in told and "the fake simulator meets" in told, "what it printed is told"
    assert machine.all_gone()
    with pytest.raises(ResetNeeded):
        env.step_chunk(STILL, capture_at=())
    machine.plan()
    run_episode(env)
    assert env.counts["launches"] == 2


def test_a_launch_that_never_gets_ready_is_ended_at_its_deadline(machine: Machine) -> None:
    machine.plan(fault="launch_hang_with_the_lock")
    env = build(launch_s=2.0)
    began = time.monotonic()
    with pytest.raises(SimulatorFault, match="no answer to launch within 2 s") as caught:
        env.reset_to(0, 0, seed=0)
    assert caught.value.kind == "launch_timeout" and 2.0 <= time.monotonic() - began < 2.0 + DEATH_S
    assert machine.all_gone()


def test_another_version_of_the_simulator_is_refused(env: RLBenchEnv, machine: Machine) -> None:
    machine.plan(version=40600)
    with pytest.raises(SimulatorFault, match=r"reports version 40600, PyRep needs 40100 \(4.1.0\)"):
        env.reset_to(0, 0, seed=0)


def test_an_action_that_rlbench_refuses_ends_the_episode_and_not_the_simulator(
    env: RLBenchEnv, machine: Machine
) -> None:
    machine.plan(fault="step_invalid", at_step=2)
    env.reset_to(0, 0, seed=0)
    with pytest.raises(SimulatorFault, match=r"rlbench\.backend\.exceptions\.InvalidActionError in step") as caught:
        env.step_chunk(STILL, capture_at=())
    assert caught.value.kind == "invalid_action" and env.counts["invalid_action"] == 1
    with pytest.raises(ResetNeeded):
        env.step_chunk(STILL, capture_at=())
    machine.plan()
    run_episode(env)
    assert env.counts["launches"] == 1


def test_a_simulator_that_talks_without_end_is_neither_stopped_nor_believed(env: RLBenchEnv, machine: Machine) -> None:
    machine.plan(fault="step_chatter")
    run_episode(env)
    machine.plan(fault="step_error")
    env.reset_to(0, 0, seed=0)
    with pytest.raises(SimulatorFault) as caught:
        env.step_chunk(STILL, capture_at=())
    assert len(str(caught.value)) < 8000


# ------------------------------------------------------------------------------------------------ restarts


def test_restarts_wait_longer_and_longer_and_end(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.plan(fault="launch_error")
    waited: list[float] = []
    monkeypatch.setattr(rlbench_supervisor.time, "sleep", waited.append)
    history = History()
    for _ in range(3):
        # A worker builds a new environment after every fault: the count goes on.
        with pytest.raises(SimulatorFault, match="deliberate, in launch"):
            build(history, max_restarts=2, backoff_s=20.0).reset_to(0, 0, seed=0)
    env = build(history, max_restarts=2)
    with pytest.raises(SimulatorFault, match="3 faults in a row, max_restarts = 2; the last: .*in launch") as caught:
        env.reset_to(0, 0, seed=0)
    assert caught.value.kind == "gave_up" and [wait for wait in waited if wait > 1] == [20.0, 30.0]
    assert history.counts == {"launches": 3, "launch_failed": 3, "gave_up": 1}


def test_an_episode_that_came_to_its_end_starts_the_count_anew(machine: Machine) -> None:
    env = build(max_restarts=1)
    for _ in range(3):
        machine.plan(fault="step_exit")
        with pytest.raises(SimulatorFault, match="exit code 3"):
            run_episode(env)
        machine.plan()
        run_episode(env)
    assert env.counts == {"launches": 4, "crashed": 3, "episodes": 3}
    env.close()


class StandStill:
    """Fits the environment, never succeeds."""

    spec = PolicySpec(
        horizon=4, executed=4, action_dim=8, state_dim=11, channels=19, views=("front", "wrist"), resolution=64,
        memory=1, imagined_offsets=(4,),
    )  # fmt: skip

    def decide(self, frames: Any, state: Any, instruction: str, *, action_seed: int, world_seed: int, **_: Any) -> Any:
        chain = np.zeros((2, 4, 19), np.float32)
        return Decision(actions=STILL, chain=chain, stochastic_step=0, logprob=0.0, world_seed=world_seed)

    def load_pair(self, world: Any, actor: Any) -> None: ...


def test_a_worker_loses_the_attempt_and_runs_the_same_ticket_on_a_new_simulator(machine: Machine) -> None:
    config = Config(env=RLBenchConfig(max_steps=8, step_s=DEADLINE_S, backoff_s=0.0))
    worker = RolloutWorker(config, lambda _: StandStill())  # type: ignore[arg-type, return-value]
    worker.setup(lambda _: ("world", "actor"))  # type: ignore[arg-type, return-value]
    machine.plan()
    expected = worker.run(ticket(init_state_id=3), pair())[1]
    machine.plan(fault="step_hang", at_step=6, once=True)
    with pytest.raises(SimulatorFault, match="no answer to step"):
        worker.run(ticket(init_state_id=3), pair())
    again = worker.run(ticket(init_state_id=3), pair())[1]
    worker._close_env()
    assert machine.all_gone() and again.truncated and again.error is None
    for name in ("frames", "state", "obs_step", "actions", "executed"):
        assert np.array_equal(getattr(again, name), getattr(expected, name))


# ------------------------------------------------------------------------------------------------ two hundred

KINDS = [fault for fault, _, _ in FAULTS] + ["launch_hang", "step_invalid", "none"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_faults_end_as_named_and_counted_episodes(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drawn from all kinds; each episode completes or is a named fault, within its deadlines, leaving nothing."""
    drawn, before = np.random.default_rng(0), left_behind()
    history = History()
    launch_s = {False: LAUNCH_S, True: 1.0}  # short where it hangs on purpose
    envs = {short: build(history, launch_s=s, max_restarts=1000) for short, s in launch_s.items()}
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    longest_s, began = 0.0, time.monotonic()
    while sum(faults.values()) < 200:
        fault = str(drawn.choice(KINDS))
        hangs_at_launch = fault == "launch_hang"
        env = envs[hangs_at_launch]
        if fault.startswith("launch"):
            env.close()
        machine.plan(fault=fault, at_step=int(drawn.integers(1, 9)) if fault.startswith("step") else 1)
        start = time.monotonic()
        try:
            run_episode(env)
            outcomes["completed"] += 1
        except SimulatorFault as error:
            outcomes[error.kind] += 1
        faults[fault] += fault != "none"
        # A launch, a reset and one step that hangs; the steps before it take no time.
        taken = time.monotonic() - start
        longest_s = max(longest_s, taken)
        assert taken < launch_s[hangs_at_launch] + 2 * DEADLINE_S + DEATH_S
    for env in envs.values():
        env.close()
    assert machine.all_gone()
    shared_memory, files, sockets = left_behind()
    assert (shared_memory, files) == before[:2] and sockets <= before[2]
    assert outcomes.pop("completed") == history.counts["episodes"]
    assert outcomes == {kind: n for kind, n in history.counts.items() if kind not in ("launches", "episodes")}
    with capsys.disabled():
        print(f"\n200 faults in {time.monotonic() - began:.0f} s, longest episode {longest_s:.2f} s")
        print(f"asked for {dict(faults)}\ncounted {dict(history.counts)}")
