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
from learners.video_config import Failures, Mixed, SuccessOnly
from tests.fakes import CountingPolicy, pair, summary, ticket
from wamrl_ray.config import StoreConfig
from wamrl_ray.rollout import EpisodeSummary, rollout, summarise
from wamrl_ray.store import EpisodeStore, load_episode, save_episode


def filled(rows, max_bytes: int = 10**6, failures: Failures | None = None, max_failure_bytes: int = 10**6):
    config = StoreConfig(max_bytes=max_bytes, max_failure_bytes=max_failure_bytes)
    store = EpisodeStore(config, failures or SuccessOnly())
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


# ------------------------------------------------------------------------------------------------ failures


def failure(ticket_id: int, start: int = 0, seq: int = 0, task: int = 0, nbytes: int = 10) -> EpisodeSummary:
    row = summary(ticket_id, task, success=False, nbytes=nbytes)
    started = dataclasses.replace(row.ticket, init_state_id=start)
    return dataclasses.replace(row, ticket=started, pair_order=(1, seq))


def held_failures(store: EpisodeStore) -> list[int]:
    return sorted(set(ids(store.sample(99, np.random.SeedSequence(0), success=False))))


def dropped(store: EpisodeStore) -> dict[str, float]:
    return {
        name.removeprefix("store/dropped_"): value
        for name, value in store.metrics().items()
        if "dropped" in name and value
    }


def test_failures_lie_apart_and_neither_part_pushes_the_other_out():
    rows = [summary(0), summary(1), failure(2, 1), failure(3, 2), failure(4, 3), failure(9, 4, nbytes=99)]
    store = filled(rows, max_bytes=20, failures=Mixed(), max_failure_bytes=20)
    assert sorted(ids(store.sample(9, np.random.SeedSequence(0)))) == [0, 1] and len(store) == 2
    assert held_failures(store) == [3, 4]
    assert dropped(store) == {"evicted_failure": 1, "too_large_failure": 1}
    assert (store.metrics()["store/failures"], store.metrics()["store/failure_bytes"]) == (2, 20)


def test_a_pair_has_a_quota_of_failures_and_the_later_ones_stay_out():
    store = filled([failure(i, start=i) for i in range(5)] + [failure(5, 9, seq=1)], failures=Mixed(per_pair=3))
    assert held_failures(store) == [0, 1, 2, 5]
    assert dropped(store) == {"pair_quota_failure": 2}


def test_a_start_has_a_quota_of_failures_and_its_oldest_makes_room():
    rows = [failure(i, start=7, seq=i) for i in range(4)] + [failure(4, start=7, seq=4, task=1)]
    store = filled(rows, failures=Mixed(per_start=2))
    assert held_failures(store) == [2, 3, 4], "the same number of another task is another start"
    assert dropped(store) == {"start_quota_failure": 2}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 60), st.booleans()), max_size=40))
def test_quotas_hold_whatever_comes_and_every_failure_is_held_or_counted(rows):
    failed = [failure(i, start, seq, nbytes=n) for i, (start, seq, n, _) in enumerate(rows)]
    made = [dataclasses.replace(row, success=ok) for row, (*_, ok) in zip(failed, rows, strict=True)]
    store = filled(made, 150, Mixed(per_pair=4, per_start=2), 100)
    held = [made[i] for i in held_failures(store)]
    assert all(n <= 4 for n in Counter(row.pair_order for row in held).values())
    assert all(n <= 2 for n in Counter(row.ticket.init_state_id for row in held).values())
    assert sum(row.nbytes for row in held) <= 100
    assert len(store) + len(held) + sum(dropped(store).values()) == len(made)


# ------------------------------------------------------------------------------------------------ files, state


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
    store = EpisodeStore(StoreConfig(), SuccessOnly())
    for i in range(4):
        episode = real_episode(i)
        store.add(summarise(episode), episode)
    store.add(summary(9, success=False), None)
    state = json.loads(json.dumps(store.state(tmp_path, save_episode)))
    assert sorted(EpisodeStore.files(state)) == sorted(path.name for path in tmp_path.glob("*.npz"))
    other = EpisodeStore(StoreConfig(), SuccessOnly())
    other.load_state(state, tmp_path, load_episode)
    assert other.metrics() == store.metrics()
    before, after = (s.sample(3, np.random.SeedSequence(5)) for s in (store, other))
    assert [e.ticket for e in before] == [e.ticket for e in after]
    assert json.loads(json.dumps(other.state(tmp_path, save_episode))) == state


def test_failures_are_restored_with_the_rest(tmp_path: Path):
    store = EpisodeStore(StoreConfig(), Mixed())
    for i in range(3):
        episode = dataclasses.replace(real_episode(i), success=i == 0)
        store.add(dataclasses.replace(summarise(episode), success=i == 0), episode)
    state = json.loads(json.dumps(store.state(tmp_path, save_episode)))
    assert len(EpisodeStore.files(state)) == 3 == len(list(tmp_path.glob("*.npz")))
    other = EpisodeStore(StoreConfig(), Mixed())
    other.load_state(state, tmp_path, load_episode)
    assert other.metrics() == store.metrics() and other.metrics()["store/failures"] == 2
    drawn = [s.sample(2, np.random.SeedSequence(1), success=False) for s in (store, other)]
    assert [e.ticket for e in drawn[0]] == [e.ticket for e in drawn[1]]
    assert not any(episode.success for episode in drawn[1])


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
        EpisodeStore(StoreConfig(), SuccessOnly()).load_state(state, tmp_path, load_episode)
