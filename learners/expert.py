"""What of the action expert is trained: all of it, or low-rank additions to its matrices (LoRA).

The actor learner predicts through it, gives its parameters to the optimiser, and has it write the result into the
policy after every step, so that what is exported, labelled with and published is a plain expert either way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from learners.optim import to_cpu
from wamrl_ray.policy.flow_sde import NOISE_HEAD, Prediction

if TYPE_CHECKING:
    from wamrl_ray.policy.wam import WAM, Context


class FullExpert:
    """Every parameter of the policy's expert."""

    def __init__(self, policy: WAM) -> None:
        self._policy = policy
        policy.expert.requires_grad_(True)

    def parameters(self) -> list[nn.Parameter]:
        return list(self._policy.expert.parameters())

    def predict(self, context: Context, x: Tensor, sigma: Tensor, state: Tensor) -> Prediction:
        """`WAM.forward`."""
        prediction: Prediction = self._policy(context, x, sigma, state)
        return prediction

    def write_back(self) -> None:
        """They are the policy's own."""

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing beside the expert's weights."""


class LoRAExpert:
    """W = W_base + scale B A for every matrix of the expert (arXiv 2106.09685 eq. 3), B zero at first.

    A (rank, in) is drawn from N(0, 1/in), B is (out, rank); biases and tables stay the base's.  A noise head has no
    base and is trained whole.
    """

    def __init__(self, policy: WAM, *, rank: int, scale: float, seed: int) -> None:
        self._policy, self._scale = policy, scale
        policy.expert.requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        self._base: dict[str, Tensor] = {}
        self._down, self._up = nn.ParameterDict(), nn.ParameterDict()
        for name, weight in sorted(self._matrices()):
            key = name.replace(".", "/")
            self._base[key] = weight.detach().clone()
            weight.requires_grad_(True)  # takes no gradient, but labels must run on the kernels that training uses
            down = torch.randn(rank, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
            self._down[key] = nn.Parameter(down.to(weight.device))
            self._up[key] = nn.Parameter(torch.zeros(weight.shape[0], rank, device=weight.device))

    def parameters(self) -> list[nn.Parameter]:
        head = [p for name, p in self._policy.expert.named_parameters() if name.startswith(NOISE_HEAD)]
        for parameter in head:
            parameter.requires_grad_(True)
        return [*self._down.parameters(), *self._up.parameters(), *head]

    def predict(self, context: Context, x: Tensor, sigma: Tensor, state: Tensor) -> Prediction:
        """`WAM.forward` with the additions, to which the gradient flows."""
        weights = {f"expert.{key.replace('/', '.')}": self._merged(key) for key in self._base}
        prediction: Prediction = functional_call(self._policy, weights, (context, x, sigma, state))
        return prediction

    @torch.no_grad()
    def write_back(self) -> None:
        """Put base + additions where the policy's expert has its matrices."""
        for name, weight in self._matrices():
            weight.copy_(self._merged(name.replace(".", "/")))

    def state(self) -> dict[str, Any]:
        return {part: to_cpu(dict(values)) for part, values in self._parts().items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        for part, values in self._parts().items():
            for key, tensor in values.items():
                tensor.copy_(state[part][key])

    def _parts(self) -> dict[str, Mapping[str, Tensor]]:
        return {"base": self._base, "down": dict(self._down), "up": dict(self._up)}

    def _merged(self, key: str) -> Tensor:
        merged: Tensor = self._base[key] + self._scale * (self._up[key] @ self._down[key])
        return merged

    def _matrices(self) -> Iterator[tuple[str, Tensor]]:
        for name, module in self._policy.expert.named_modules():
            if isinstance(module, nn.Linear) and not name.startswith(NOISE_HEAD.rstrip(".")):
                yield f"{name}.weight", module.weight
