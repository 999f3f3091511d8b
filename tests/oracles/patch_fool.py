"""Patch-Fool for one image, slow and obvious: Fu et al. 2022, with the loops of the paper's algorithm."""

import torch
import torch.nn.functional as F
from torch import Tensor

from oracles import vit
from oracles.vit import Model


def attended(model: Model, image: Tensor, layer: int) -> int:
    """The patch that receives most attention in a layer."""
    prefix = model.num_prefix_tokens
    a = vit.run(model, vit.embed(model, image)).blocks[layer].A[0]
    totals = [
        sum(float(a[h, i, j]) for h in range(len(a)) for i in range(a.shape[1])) for j in range(a.shape[2])
    ]
    return max(range(prefix, len(totals)), key=lambda j: totals[j]) - prefix


def patch_fool(
    model: Model, image: Tensor, label: int, patch: int, noise: Tensor, mean: Tensor, std: Tensor, steps: int
) -> Tensor:
    """image (1,3,H,W) normalized, noise in 0..1 of its shape: the attacked image after all steps."""
    rows, columns = model.patch_embed.grid_size
    height, width = image.shape[2] // rows, image.shape[3] // columns
    top, left = patch // columns * height, patch % columns * width
    mask = torch.zeros_like(image)
    mask[:, :, top : top + height, left : left + width] = 1
    delta = ((noise - mean) / std).requires_grad_()
    optimizer = torch.optim.Adam([delta], lr=0.22, maximize=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.95)
    for _ in range(steps):
        state = vit.run(model, vit.embed(model, image * (1 - mask) + delta * mask))
        loss = F.cross_entropy(state.logits, torch.tensor([label]))
        (g,) = torch.autograd.grad(loss, delta, retain_graph=True)
        total = g.clone()
        for layer in range(1, len(model.blocks) // 2):
            to_patch = state.blocks[layer].A[0].mean(0)[:, model.num_prefix_tokens + patch]
            (own,) = torch.autograd.grad(to_patch.log().mean(), delta, retain_graph=True)
            if (own * g).sum() < 0:
                own = own - (own * g).sum() / g.norm() * g
            total = total + 0.002 * own
        delta.grad = total
        optimizer.step()
        schedule.step()
        delta.data = torch.max(torch.min(delta.data, (1 - mean) / std), (0 - mean) / std)
    return (image * (1 - mask) + delta * mask).detach()
