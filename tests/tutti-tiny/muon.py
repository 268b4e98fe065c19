"""Muon (Keller Jordan, 2024) in f32: momentum whose matrix updates are made orthogonal by Newton-Schulz iterations.

Training tutti-tiny takes about half as many steps as with AdamW. torch.optim.Muon is not used: it iterates in bfloat16,
which a CPU without AVX-512 emulates.
"""

import torch

NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalised(matrices):
    """Returns approximately the nearest semi-orthogonal matrix of each matrix in a stack."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Updates all parameters of one shape as one stack, because small matrix products alone would not use all cores."""

    def __init__(self, parameters, lr, momentum=0.95, weight_decay=0.1):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = {}
            for weight in group["params"]:
                by_shape.setdefault(weight.shape, []).append(weight)
            for shape, weights in by_shape.items():
                self.update_stack(group, shape, weights)

    def update_stack(self, group, shape, weights):
        updates = []
        for weight in weights:
            state = self.state[weight]
            momentum = state.setdefault("momentum", torch.zeros_like(weight))
            momentum.lerp_(weight.grad, 1 - group["momentum"])
            updates.append(weight.grad.lerp(momentum, group["momentum"]))
        scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
        for weight, update in zip(weights, orthogonalised(torch.stack(updates))):
            weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=scale)
