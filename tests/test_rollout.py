"""The step loop, on the counting environment: every frame says which step it is of."""

import dataclasses

import numpy as np
import pytest

from envs.counting import CountingConfig, CountingEnv
from tests.fakes import CountingPolicy, pair, ticket
from wamrl_ray.rollout import rollout, summarise


def run(init_state_id: int = 0, purpose: str = "train", policy: CountingPolicy | None = None, **config):
    split = "train" if init_state_id < 40 else "held_out"
    env = CountingEnv(CountingConfig(**config), split)
    return rollout(env, policy or CountingPolicy(), ticket(3, 1, init_state_id, purpose), pair())


def test_a_success_ends_the_episode_with_hand_counted_indices():
    # Success at step 12, chunks of 5, offsets (2, 5, 7): 7 lies beyond a chunk, 14 is never reached.
    episode = run()
    assert episode.obs_step.tolist() == [0, 2, 5, 7, 10, 12]
    assert episode.decision_obs.tolist() == [0, 2, 4]
    assert episode.executed.tolist() == [5, 5, 2]
    assert (episode.success, episode.success_step) == (True, 12)
    assert (episode.terminated, episode.truncated, episode.error) == (True, False, None)
    assert episode.env_reward.tolist() == [0, 0, 1]


def test_every_observation_is_of_the_step_it_claims():
    episode = run(init_state_id=4)
    assert episode.frames[:, 0, 0, 0].tolist() == [[step, 1, 4] for step in episode.obs_step]
    assert episode.state[:, 0].tolist() == episode.obs_step.tolist()


def test_without_success_the_episode_is_truncated_at_max_steps():
    episode = run(init_state_id=1)
    assert episode.executed.tolist() == [5, 5, 5, 5, 4] and episode.env_steps == 24
    assert (episode.success, episode.success_step) == (False, -1)
    assert (episode.terminated, episode.truncated) == (False, True)


def test_success_and_termination_are_apart():
    episode = run(ends_on_success=False)
    # The chunk that reached step 12 ends at 15: the first moment at which success is known.
    assert (episode.success, episode.success_step, episode.terminated, episode.truncated) == (True, 15, False, True)


def test_memory_is_the_last_decisions_frames_with_the_first_repeated():
    policy = CountingPolicy()
    run(init_state_id=1, policy=policy)
    assert [seen[0] for seen in policy.seen] == [[0, 0, 0], [0, 0, 5], [0, 5, 10], [5, 10, 15], [10, 15, 20]]
    assert [seen[1] for seen in policy.seen] == [0, 5, 10, 15, 20]
    assert {seen[2] for seen in policy.seen} == {"count again"}


def test_randomness_comes_from_the_ticket_alone_and_differs_between_decisions_and_streams():
    policy, again = CountingPolicy(), CountingPolicy()
    run(init_state_id=1, policy=policy)
    run(init_state_id=1, policy=again)
    assert policy.seen == again.seen
    seeds = [seen[3] for seen in policy.seen] + [seen[4] for seen in policy.seen]
    assert len(set(seeds)) == 10 and all(0 <= seed < 2**63 for seed in seeds)


def test_a_decisions_seeds_do_not_depend_on_how_long_episodes_may_be():
    short, long = CountingPolicy(), CountingPolicy()
    run(init_state_id=1, policy=short)
    run(init_state_id=1, policy=long, max_steps=60)
    assert [s[3:5] for s in short.seen] == [s[3:5] for s in long.seen[: len(short.seen)]]


def test_only_training_tickets_explore():
    for purpose, stochastic in (("train", True), ("eval", False)):
        policy = CountingPolicy()
        run(purpose=purpose, policy=policy)
        assert {seen[5] for seen in policy.seen} == {stochastic}


@pytest.mark.parametrize("field", ["actions", "chain", "logprob"])
@pytest.mark.parametrize("bad_decision", [0, 1])
def test_a_non_finite_decision_ends_the_episode_with_an_error_that_names_it(field: str, bad_decision: int):
    class Broken(CountingPolicy):
        def decide(self, *args, **kwargs):
            decision = super().decide(*args, **kwargs)
            if len(self.seen) <= bad_decision:
                return decision
            bad = np.inf if field == "logprob" else np.full_like(getattr(decision, field), np.nan)
            return dataclasses.replace(decision, **{field: bad})

    episode = run(policy=Broken())
    assert f"ticket 3, decision {bad_decision}: the policy's {field} is not finite" in episode.error
    assert episode.num_decisions == bad_decision and not episode.success
    assert episode.chain.shape == (bad_decision, 3, 8, 3) and episode.actions.shape == (bad_decision, 5, 1)
    assert summarise(episode).error == episode.error


def test_an_exception_of_the_environment_propagates():
    with pytest.raises(RuntimeError, match="counting: the fault"):
        run(init_state_id=0, fault="raise")


def test_a_policy_of_other_sizes_is_refused_with_field_and_remedy():
    policy = CountingPolicy()
    policy.spec = dataclasses.replace(policy.spec, resolution=32)
    with pytest.raises(ValueError, match=r"policy.spec.resolution = 32.*has 16.*use a base"):
        run(policy=policy)


def test_the_summary_counts_what_the_episode_holds():
    episode = run()
    got = summarise(episode)
    assert (got.env_steps, got.num_decisions, got.success_step, got.env_reward) == (12, 3, 12, 1.0)
    assert got.nbytes == episode.nbytes > 6 * 16 * 16 * 3
    assert got.ticket == episode.ticket and got.pair_order == (1, 0)
