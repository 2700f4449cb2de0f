"""The ticket office: a pure function of (seed, iteration), balanced, admitted, and never held out for training."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wamrl_ray.config import RolloutConfig
from wamrl_ray.tickets import EVALUATION_IDS, TicketOffice, split_of
from wamrl_ray.types import EnvSpec

SPEC = EnvSpec(
    name="toy", simulator="none", instructions=("a", "b", "c"), views=("v",), resolution=8, state_dim=1, action_dim=1,
    max_steps=9, init_states={"train": range(0, 4), "held_out": range(4, 6)},
)  # fmt: skip


def office(seed: int = 0, episodes: int = 12, group: int = 2, tasks: tuple[int, ...] = ()) -> TicketOffice:
    return TicketOffice(seed, SPEC, RolloutConfig(episodes_per_iteration=episodes, group_size=group), tasks)


def issue(o: TicketOffice, iteration: int):
    tickets = o.train_tickets(iteration)
    o.settle(tickets)
    return tickets


def test_tickets_of_an_iteration_do_not_depend_on_what_was_issued_before():
    first = office()
    for i in range(3):
        issue(first, i)
    assert issue(first, 3) == issue(office(), 3)
    assert issue(office(seed=1), 3) != issue(office(), 3)


def test_ids_count_up_over_iterations():
    o = office()
    assert [t.ticket_id for i in range(3) for t in issue(o, i)] == list(range(36))


def test_a_group_shares_task_and_initial_state_but_not_its_randomness():
    tickets = issue(office(group=4), 0)
    for i in range(0, 12, 4):
        assert len({(t.task_id, t.init_state_id) for t in tickets[i : i + 4]}) == 1
    assert len({int(t.seed("action").generate_state(1)[0]) for t in tickets}) == 12


def test_tasks_are_balanced_and_every_training_state_is_visited_before_one_repeats():
    o = office()
    starts = Counter((t.task_id, t.init_state_id) for i in range(2) for t in issue(o, i))
    # 2 iterations x 6 groups = 3 tasks x 4 states, each once, each with 2 tickets.
    assert starts == {(task, state): 2 for task in range(3) for state in range(4)}


def test_the_order_of_states_changes_from_lap_to_lap_and_from_task_to_task():
    o = office(episodes=24)
    orders = [[t.init_state_id for t in issue(o, lap) if t.task_id == task][::2] for lap in range(4) for task in (0, 1)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len(set(map(tuple, orders))) > 3


def test_only_the_environments_tasks_get_tickets():
    o = office(tasks=(2, 0))
    assert {t.task_id for t in issue(o, 0)} == {0, 2}
    assert {t.task_id for t in o.eval_tickets("train", 6)} == {0, 2}


def test_admission_refuses_a_second_iteration_before_the_first_is_settled():
    o = office()
    tickets = o.train_tickets(0)
    assert (o.outstanding, o.capacity) == (12, 12)
    with pytest.raises(RuntimeError, match="12 outstanding"):
        o.train_tickets(1)
    o.settle(tickets[:11])
    with pytest.raises(RuntimeError, match="1 outstanding"):
        o.train_tickets(1)
    o.settle(tickets[11:])
    o.train_tickets(1)


def test_a_ticket_is_settled_once():
    o = office()
    tickets = issue(o, 0)
    with pytest.raises(ValueError, match="not outstanding"):
        o.settle(tickets[:1])


@settings(max_examples=30, deadline=None)
@given(iteration=st.integers(0, 10_000), seed=st.integers(0, 2**32))
def test_no_training_ticket_ever_starts_from_a_held_out_state(iteration: int, seed: int):
    assert {t.init_state_id for t in issue(office(seed), iteration)} <= set(SPEC.init_states["train"])


def test_overlapping_splits_are_refused():
    with pytest.raises(ValueError, match="disjoint"):
        bad = dataclasses.replace(SPEC, init_states={"train": range(0, 5), "held_out": range(4, 6)})
        TicketOffice(0, bad, RolloutConfig())


def test_evaluation_spreads_over_tasks_then_states_then_seeds():
    tickets = office().eval_tickets("held_out", 8)
    starts = [(t.task_id, t.init_state_id) for t in tickets]
    assert starts == [(0, 4), (1, 4), (2, 4), (0, 5), (1, 5), (2, 5), (0, 4), (1, 4)]
    assert len({int(t.seed("action").generate_state(1)[0]) for t in tickets}) == 8
    assert {t.purpose for t in tickets} == {"eval"}


def test_evaluation_ids_are_apart_from_training_and_between_splits():
    o = office()
    ids = [t.ticket_id for split in ("train", "held_out") for t in o.eval_tickets(split, 100)]
    assert len(set(ids)) == 200 and min(ids) == EVALUATION_IDS["train"] == 1 << 40
    assert o.outstanding == 0


def test_state_restores_the_counters():
    o = office()
    o.train_tickets(0)
    other = office()
    other.load_state(o.state())
    assert other.outstanding == 12 and other.state() == o.state()


def test_split_of_names_the_split_or_refuses():
    assert (split_of(SPEC, 3), split_of(SPEC, 4)) == ("train", "held_out")
    with pytest.raises(ValueError, match="init_state_id = 6"):
        split_of(SPEC, 6)
