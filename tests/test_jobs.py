"""How a run meets its cluster: what is passed to `ray.init`, and real jobs submitted to a head on this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.job_submission import JobStatus, JobSubmissionClient

from wamrl_ray.jobs import OBJECT_STORE_BYTES, connect

ROOT = Path(__file__).parent.parent
PYTHON = sys.executable
SMALL = [
    "--rollout.episodes-per-iteration=4",
    "--rollout.group-size=2",
    "--rollout.deadline-s=300",
    "--evaluation.episodes=2",
]


@pytest.fixture
def init_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `ray.init` would have been called with, on a process that is not connected."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **kwargs: calls.append(kwargs))
    return calls


def test_inside_a_job_nothing_is_said_that_the_submitter_decides(
    init_calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    assert connect(num_workers=4) is False
    assert len(init_calls) == 1
    assert not {"runtime_env", "num_cpus", "address", "object_store_memory", "include_dashboard"} & init_calls[0].keys()
    assert "RAY_AUTH_MODE" not in os.environ, "authentication is the cluster's business"


def test_a_cluster_of_our_own_is_local_small_and_has_room_for_every_worker(
    init_calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    assert connect(num_workers=3, threads=2) is True
    (call,) = init_calls
    assert call["address"] == "local" and call["_node_ip_address"] == "127.0.0.1"
    assert call["include_dashboard"] is False and os.environ["RAY_AUTH_MODE"] == "disabled"
    assert call["num_cpus"] >= 3 * 2
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert call["object_store_memory"] == min(OBJECT_STORE_BYTES, int(0.3 * memory))


# ------------------------------------------------------------------------------------------------ submitted jobs


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The dashboard address of a Ray head on the loopback address; its processes end with this fixture."""
    gcs, dashboard, client, agent, agent_grpc, metrics = free_ports(6)
    folder = Path("/tmp") / f"wj{os.getpid()}"  # socket paths must stay short
    command = [
        PYTHON, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats",
        "--node-ip-address=127.0.0.1", "--num-cpus=2", "--object-store-memory=300000000", f"--temp-dir={folder}",
        f"--port={gcs}", f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1",
        f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}",
        f"--dashboard-agent-grpc-port={agent_grpc}", f"--metrics-export-port={metrics}",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("head") / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment(), start_new_session=True)
    address = f"http://127.0.0.1:{dashboard}"
    end = time.monotonic() + 180
    while ray_cli("job", "list", "--address", address, timeout=60).returncode != 0:
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(1)
    yield address
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def environment() -> dict[str, str]:
    own = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return {**{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}, **own}


def ray_cli(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYTHON, "-m", "ray.scripts.scripts", *arguments],
        env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


def submit(head: str, *arguments: str, job: str, wait: bool = True) -> subprocess.CompletedProcess[str]:
    variables = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "180"}})
    return ray_cli(
        "job", "submit", "--address", head, "--submission-id", job, "--runtime-env-json", variables,
        *([] if wait else ["--no-wait"]), "--", PYTHON, "-m", "wamrl_ray", *arguments, timeout=570,
    )  # fmt: skip


def exit_code_of_driver(head: str, job: str) -> int | None:
    """The waiting command knows only success and failure; the driver's own code is in the job's record."""
    return JobSubmissionClient(head).get_job_info(job).driver_exit_code


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_submitted_job_trains_and_reports_the_drivers_exit_code(head: str, tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    done = submit(
        head, "train", "--config", "configs/debug.yaml", "--run-dir", run_dir, "--iterations", "1", *SMALL, job="good"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["iterations"] == 1 and summary["pairs_committed"] >= 1
    assert f"actor_digest {summary['actor_digest']}" in done.stdout
    assert exit_code_of_driver(head, "good") == 0

    wrong = submit(head, "train", "--config", "configs/debug.yaml", "--rollout.num-worker", "3", job="wrong")
    assert wrong.returncode == 1 and "did you mean rollout.num_workers?" in wrong.stdout
    assert exit_code_of_driver(head, "wrong") == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stopped_job_leaves_a_checkpoint_and_is_continued(head: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train = ("train", "--config", "configs/debug.yaml", "--run-dir", str(run_dir), *SMALL)
    submitted = submit(head, *train, "--iterations", "1000", "--checkpoint.every", "1000", job="long", wait=False)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    client, end = JobSubmissionClient(head), time.monotonic() + 300
    while not (run_dir / "metrics.jsonl").exists():
        alive = client.get_job_status("long") in (JobStatus.PENDING, JobStatus.RUNNING)
        assert alive and time.monotonic() < end, client.get_job_logs("long")
        time.sleep(0.5)
    stopped = ray_cli("job", "stop", "--address", head, "long", timeout=240)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    (checkpoint,) = (run_dir / "checkpoints").glob("iter_*/manifest.json")
    assert not list((run_dir / "checkpoints").glob(".iter_*"))
    done = int(checkpoint.parent.name.removeprefix("iter_"))
    again = submit(head, *train, "--iterations", str(done + 1), "--resume", "auto", job="again")
    assert again.returncode == 0, again.stdout + again.stderr
    assert json.loads((run_dir / "summary.json").read_text())["iterations"] == done + 1
