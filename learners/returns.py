"""Returns and advantages over decisions, as pure functions.  The actor learner calls them with labelled rewards.

Time-major: (T, B) is decision x episode, shorter episodes padded at the end and masked.  Termination enters only
through `discount` = gamma (1 - terminated), padding only through `mask`; a truncated episode bootstraps.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    reward: Tensor, value: Tensor, discount: Tensor, mask: Tensor, bootstrap_value: Tensor, *, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, arXiv 1506.02438 eq. 16: A_t = delta_t + discount_t lambda A_{t+1},
    delta_t = r_t + discount_t V_{t+1} - V_t.

    reward, value, discount, mask (T, B); mask is 1 on each episode's T_b first rows.  bootstrap_value (B,) is the value
    of what follows an episode's last decision; it counts only where that decision did not terminate (discount > 0).
    Returns (advantage, value target = advantage + value), both (T, B) and 0 on padding.
    """
    if not (reward.shape == value.shape == discount.shape == mask.shape and bootstrap_value.shape == reward.shape[1:]):
        raise ValueError(
            f"reward {tuple(reward.shape)}, value {tuple(value.shape)}, discount {tuple(discount.shape)}, mask "
            f"{tuple(mask.shape)}, bootstrap_value {tuple(bootstrap_value.shape)}: expected (T, B) four times and (B,)"
        )
    valid = mask.to(value.dtype)
    advantage = torch.zeros_like(value)
    following = bootstrap_value
    carried = torch.zeros_like(bootstrap_value)
    for t in reversed(range(len(reward))):
        delta = reward[t] + discount[t] * following - value[t]
        carried = valid[t] * (delta + discount[t] * gae_lambda * carried)
        advantage[t] = carried
        following = torch.where(valid[t] > 0, value[t], following)
    return advantage, (advantage + value) * valid


def group_advantage(episode_return: Tensor, group: Tensor) -> Tensor:
    """Group-relative advantage, arXiv 2402.03300 section 4.1.2: (R - mean of group) / (std of group + 1e-6).

    episode_return (B,), group (B,) integer ids (equal = same task and initial state).  A group of one, or of equal
    returns, has advantage 0: it says nothing about which action was better.  Returns (B,).
    """
    _, member = torch.unique(group, return_inverse=True)
    size = int(member.max()) + 1 if len(member) else 0
    exact = episode_return.double()

    def mean(x: Tensor) -> Tensor:
        total = torch.zeros(size, dtype=x.dtype, device=x.device).index_add_(0, member, x)
        count = torch.zeros(size, dtype=x.dtype, device=x.device).index_add_(0, member, torch.ones_like(x))
        return (total / count)[member]

    # Rounding, of the mean or of the returns, must not become an advantage of order 1 in a group of equal returns.
    centred = exact - mean(exact)
    centred = torch.where(centred.abs() <= 1e-6 * (1.0 + exact.abs()), torch.zeros_like(centred), centred)
    return (centred / (mean(centred.square()).sqrt() + 1e-6)).to(episode_return.dtype)


def normalise(advantage: Tensor, mask: Tensor) -> Tensor:
    """Zero mean and unit std over valid entries of the whole update; 0 on padding.  Any shape, mask the same shape."""
    valid, exact = mask.double(), advantage.double()  # in FP32 the mean's rounding makes equal advantages differ from 0
    count = valid.sum().clamp(min=1.0)
    centred = (exact - (exact * valid).sum() / count) * valid
    return (centred / ((centred.square().sum() / count).sqrt() + 1e-5)).to(advantage.dtype)


def explained_variance(value: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(target - value) / Var(target) over valid entries: 1 perfect, 0 no better than a constant."""
    value, target = value[mask.bool()], target[mask.bool()]
    spread = target.var(unbiased=False) if len(target) else target.sum()
    if float(spread) < 1e-8:
        return torch.zeros((), dtype=value.dtype, device=value.device)
    return 1.0 - (target - value).var(unbiased=False) / spread


def denoise_discount(step: Tensor, *, num_steps: int, discount: float) -> Tensor:
    """discount^(K - 1 - k) for denoising steps k (any shape): the credit of a transition falls with the steps between
    it and the action (arXiv 2409.00588 section 4.3, DPPO's gamma_denoise).  1 credits all alike."""
    return torch.as_tensor(discount, dtype=torch.float32, device=step.device) ** (num_steps - 1 - step)
