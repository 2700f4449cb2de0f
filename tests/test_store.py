"""The episode store: what is kept, what is sampled, what leaves, and that a file gives back the same episode."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.counting import CountingConfig, CountingEnv
from tests.fakes import CountingPolicy, pair, summary, ticket
from wamrl_ray.config import StoreConfig
from wamrl_ray.rollout import rollout, summarise
from wamrl_ray.store import EpisodeStore, load_episode, save_episode


def filled(rows, max_bytes: int = 10**6) -> EpisodeStore:
    store = EpisodeStore(StoreConfig(max_bytes=max_bytes))
    for row in rows:
        store.add(row, f"handle {row.ticket.ticket_id}")
    return store


def ids(handles) -> list[int]:
    return [int(handle.split()[1]) for handle in handles]


def test_only_successes_enter_and_the_rest_is_counted_by_reason():
    broken = dataclasses.replace(summary(2), error="why")
    store = filled([summary(0), summary(1, success=False), broken, summary(3, nbytes=10**7)])
    assert len(store) == 1
    counted = {name: value for name, value in store.metrics().items() if "dropped" in name and value}
    assert counted == {
        "store/dropped_failure": 1, "store/dropped_error_success": 1, "store/dropped_too_large_success": 1
    }  # fmt: skip


def test_the_oldest_of_the_best_filled_task_leaves_first():
    # Room for four.  Ticket 4 finds task 0 with three of four: ticket 1 goes, though ticket 0 is older.  Ticket 5 finds
    # task 1 with three of five (0, 4, 5): ticket 0 goes.
    store = filled([summary(0, 1), summary(1, 0), summary(2, 0), summary(3, 0), summary(4, 1)], 40)
    assert sorted(set(ids(store.sample(99, np.random.SeedSequence(0))))) == [0, 2, 3, 4]
    store.add(summary(5, 1), "handle 5")
    assert sorted(set(ids(store.sample(99, np.random.SeedSequence(0))))) == [2, 3, 4, 5]
    assert store.metrics()["store/dropped_evicted_success"] == 2


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 60)), max_size=40), st.integers(60, 200))
def test_bytes_stay_bounded_and_every_episode_is_held_or_counted(rows, max_bytes: int):
    store = filled([summary(i, task, success=ok, nbytes=n) for i, (task, ok, n) in enumerate(rows)], max_bytes)
    assert store.nbytes <= max_bytes
    dropped = sum(value for name, value in store.metrics().items() if "dropped" in name)
    assert len(store) + dropped == len(rows)


def test_sampling_is_balanced_over_tasks_even_if_successes_are_not():
    store = filled([summary(i, 0) for i in range(50)] + [summary(50, 1)])
    drawn = Counter(0 if i < 50 else 1 for i in ids(store.sample(16, np.random.SeedSequence(0))))
    assert drawn == {0: 8, 1: 8}


def test_sampling_repeats_nothing_within_a_task_before_all_came_and_stops_when_all_tasks_are_even():
    store = filled([summary(i, i % 2) for i in range(6)])
    assert sorted(ids(store.sample(6, np.random.SeedSequence(3)))) == list(range(6))
    assert len(store.sample(100, np.random.SeedSequence(3))) == 6
    assert filled([]).sample(5, np.random.SeedSequence(0)) == []


def test_sampling_is_a_function_of_contents_and_seed():
    store = filled([summary(i, i % 3) for i in range(30)])
    draw = [ids(store.sample(9, np.random.SeedSequence([7, i]))) for i in (0, 0, 1)]
    assert draw[0] == draw[1] != draw[2]


def real_episode(ticket_id: int = 0):
    return rollout(CountingEnv(CountingConfig(), "train"), CountingPolicy(), ticket(ticket_id), pair())


def test_an_episode_file_gives_back_an_equal_episode(tmp_path: Path):
    episode = dataclasses.replace(real_episode(), error="a reason")
    save_episode(episode, tmp_path / "e.npz")
    loaded = load_episode(tmp_path / "e.npz")
    for name, value in vars(episode).items():
        other = getattr(loaded, name)
        if isinstance(value, np.ndarray):
            assert other.dtype == value.dtype and np.array_equal(other, value), name
        else:
            assert other == value and type(other) is type(value), name
    assert [path.name for path in tmp_path.iterdir()] == ["e.npz"]


def test_a_killed_write_leaves_no_episode_file(tmp_path: Path, monkeypatch):
    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", killed)
    with pytest.raises(KeyboardInterrupt):
        save_episode(real_episode(), tmp_path / "e.npz")
    assert list(tmp_path.iterdir()) == []


def test_state_restores_contents_samples_and_counters_through_json(tmp_path: Path):
    store = EpisodeStore(StoreConfig())
    for i in range(4):
        episode = real_episode(i)
        store.add(summarise(episode), episode)
    store.add(summary(9, success=False), None)
    state = json.loads(json.dumps(store.state(tmp_path, save_episode)))
    assert sorted(EpisodeStore.files(state)) == sorted(path.name for path in tmp_path.glob("*.npz"))
    other = EpisodeStore(StoreConfig())
    other.load_state(state, tmp_path, load_episode)
    assert other.metrics() == store.metrics()
    before, after = (s.sample(3, np.random.SeedSequence(5)) for s in (store, other))
    assert [e.ticket for e in before] == [e.ticket for e in after]
    assert json.loads(json.dumps(other.state(tmp_path, save_episode))) == state


def test_an_episode_already_on_disk_is_not_written_again(tmp_path: Path):
    store, written = filled([summary(0), summary(1)]), []

    def persist(handle: str, path: Path) -> None:
        written.append(handle)
        path.touch()

    store.state(tmp_path, persist)
    store.state(tmp_path, persist)
    assert written == ["handle 0", "handle 1"]


def test_a_missing_episode_file_is_named(tmp_path: Path):
    state = filled([summary(0)]).state(tmp_path, lambda handle, path: None)
    with pytest.raises(ValueError, match="ticket_000000000_pair_1_0.npz.*gone"):
        EpisodeStore(StoreConfig()).load_state(state, tmp_path, load_episode)
