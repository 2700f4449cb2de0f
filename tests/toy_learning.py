"""Learners of toy size and episodes that the same network acted, for the learners' tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from learners.actor_config import ActorFlowSDEConfig
from learners.actor_flow_sde import ActorFlowSDELearner
from learners.clip import ClipFrames
from learners.labels import LabelledBatch, Labeller, label_episodes
from learners.video_batch import VideoBatch, of_episodes
from learners.video_config import VideoSFTConfig
from learners.video_sampling import is_held_out
from learners.video_sft import VideoSFTLearner
from learners.windows import Windows, make_windows
from wamrl_ray.policy.flow_sde import SamplerConfig
from wamrl_ray.policy.wam import WAM, WAMConfig
from wamrl_ray.policy.weights import to_snapshot
from wamrl_ray.rewards.reconstruction import RewardConfig
from wamrl_ray.types import Demonstration, Episode, Pair, Snapshot, Ticket, seed_sequence

SAMPLER = SamplerConfig()


def tiny(seed: int = 0, sampler: SamplerConfig = SAMPLER) -> WAM:
    return WAM(WAMConfig.debug(), sampler, seed=seed)


def pair_of(policy: WAM, seq: int = 0) -> Pair:
    world, actor = policy.export("world").digest, policy.export("actor").digest
    return Pair(
        epoch=0, seq=seq, world=world, actor=actor, trained_against_world=world, interface=policy.interface_digest
    )


def picture(position: np.ndarray) -> np.ndarray:
    """A bright square at a place in [0, 1]^2."""
    image = np.full((1, 32, 32, 3), 40, np.uint8)
    row, column = (np.clip(position, 0, 1) * 24).astype(int)
    image[0, row : row + 8, column : column + 8] = (250, 120, 20)
    return image


def act(
    policy: WAM, pair: Pair, ticket_id: int, *, decisions: int = 3, success: bool = False, **ticket: Any
) -> Episode:
    """An episode of a square that the actions push; E = 4, offsets 2 and 4; success is step 3 of the last chunk."""
    rng = np.random.default_rng(ticket_id)
    position = rng.uniform(0.2, 0.8, 2)
    frames, states, steps = [picture(position)], [position], [0]
    made, at = [], []
    executed = [4] * decisions
    executed[-1] = 3 if success else 4
    stochastic = ticket.get("purpose", "train") == "train"
    for t in range(decisions):
        at.append(len(frames) - 1)
        decision = policy.decide(
            frames[-1][None], np.float32(states[-1]), "reach the square", action_seed=100 * ticket_id + t,
            world_seed=7 * ticket_id + t, stochastic=stochastic,
        )  # fmt: skip
        made.append(decision)
        for step, action in enumerate(decision.actions[: executed[t]], start=1):
            position = np.clip(position + 0.05 * action, 0, 1)
            if step in (2, 4):
                frames.append(picture(position))
                states.append(position)
                steps.append(4 * t + step)
    chain = np.stack([d.chain for d in made])
    fields = {"env": "reach", "task_id": 0, "init_state_id": ticket_id, "run_seed": 0, "purpose": "train"} | ticket
    return Episode(
        ticket=Ticket(ticket_id=ticket_id, deadline_s=9.0, **fields), instruction="reach the square", pair=pair,
        frames=np.stack(frames), state=np.float32(np.stack(states)), obs_step=np.int32(steps),
        decision_obs=np.int32(at), chain=chain, stochastic_step=np.int32([d.stochastic_step for d in made]),
        behaviour_logprob=np.float32([d.logprob for d in made]), world_seed=np.int64([d.world_seed for d in made]),
        actions=np.stack([d.actions for d in made]), executed=np.int32(executed),
        env_reward=np.float32([0.0] * (decisions - 1) + [float(success)]), success=success,
        success_step=sum(executed) if success else -1, terminated=success, truncated=not success,
    )  # fmt: skip


def toy_episodes(policy: WAM | None = None, seq: int = 0) -> list[Episode]:
    """Six episodes, two of each of three starts; the even ones succeed and have 2 decisions, the odd ones have 3."""
    policy = policy or tiny()
    pair = pair_of(policy, seq)
    return [act(policy, pair, i, decisions=2 + i % 2, success=i % 2 == 0, init_state_id=i // 2) for i in range(6)]


def actor(
    policy: WAM | None = None, reward: RewardConfig | None = None, sampler: SamplerConfig = SAMPLER, **config: Any
) -> ActorFlowSDELearner:
    policy = policy or tiny(sampler=sampler)
    defaults = {"lr": 1e-3, "batch_size": 6, "micro_batch": 6}
    learner = ActorFlowSDELearner(
        ActorFlowSDEConfig(**(defaults | config)), sampler, reward or RewardConfig(imagine_steps=1), policy, run_seed=0
    )
    learner.remember(pair_of(policy), policy.export("world"), policy.export("actor"))
    return learner


def video(*, windows: Windows | None = None, **config: Any) -> VideoSFTLearner:
    defaults = {"lr": 1e-3, "batch_size": 4, "steps_per_update": 3, "probe_windows": 4, "held_out_share": 0.0}
    config = {**defaults, **config}
    return VideoSFTLearner(VideoSFTConfig(**config), tiny(), tiny(), run_seed=0, pretraining=windows)


def batch_of(episodes: list[Episode], picks: list[tuple[int, int]]) -> VideoBatch:
    return of_episodes(episodes, picks, tiny().spec)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def share_that_holds_out_some(starts: range) -> tuple[float, list[int]]:
    """A share at which at least one of the starts of task 0 is held out and at least one is not."""
    for share in (0.3, 0.5, 0.7):
        held = [start for start in starts if is_held_out(0, 0, start, share)]
        if 0 < len(held) < len(starts):
            return share, held
    raise AssertionError("no such share")


def demonstration_windows() -> Windows:
    """Four windows of one demonstration with another instruction than the episodes'."""
    steps = 8
    places = np.random.default_rng(5).uniform(0.1, 0.9, (steps + 1, 2))
    demo = Demonstration(
        env="reach", simulator="none", task_id=0, init_state_id=0, seed=0, instruction="reach the circle", success=True,
        frames=np.stack([picture(p) for p in places[::2]]), obs_step=np.arange(0, steps + 1, 2, dtype=np.int32),
        state=np.float32(places), action=np.zeros((steps, 2), np.float32), label=np.zeros((steps, 2), np.float32),
    )  # fmt: skip
    return make_windows([demo], WAMConfig.debug())


def moved(policy: WAM, component: Literal["world", "actor"], by: float = 0.03) -> Snapshot:
    """Other weights of the same shapes."""
    return to_snapshot(component, {k: v + by for k, v in policy.component(component).state_dict().items()})


def labelled(learner: ActorFlowSDELearner, episodes: Sequence[Episode]) -> list[LabelledBatch]:
    """The micro-batches that `update` would make at index 0."""
    labeller = Labeller(
        policy=learner.policy, metric=learner.metric, reward=learner.reward, config=learner.config, clip=ClipFrames()
    )
    rng = np.random.default_rng(seed_sequence(learner.run_seed, 0, "learner"))
    pairs = list(learner.pairs.values())
    return label_episodes(labeller, episodes, pairs, world=learner.world, base=learner.base, rng=rng)


def gradients(learner: ActorFlowSDELearner, episodes: Sequence[Episode]) -> list[torch.Tensor]:
    """The gradient of every step of an update before it is clipped, each as one flat vector."""
    taken: list[torch.Tensor] = []
    apply, parameters = learner.optimizer.apply, learner.optimizer.parameters

    def watched() -> float:
        flat = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters]
        taken.append(torch.cat(flat))
        return apply()

    learner.optimizer.apply = watched  # type: ignore[method-assign]
    learner.update(episodes, index=0)
    return taken


def equal(a: Any, b: Any) -> bool:
    """Same nested structure, same bits."""
    if isinstance(a, torch.Tensor):
        return bool(torch.equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)
