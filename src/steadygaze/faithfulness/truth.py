"""Metrics against known relevance, and synthetic tasks for which it is known (docs/equations.md#known-truth).

A patch is relevant if most of its labeled pixels are object (255). Patches without labeled pixels are
left out.

    truth_auroc       P(a relevant patch scores higher than another one), ties count half; 0..1, chance
                      level 0.5
    truth_precision   100 · |relevant ∩ top n| / n, n the number of relevant patches; ties in raster order;
                      0..100

Higher is better. NaN where all patches are relevant, or none.

Tasks on which a small ViT is trained:

counting   grid x grid cells of pure colors; the class is the number n of red cells (Vision DiffMask). The
           red cells and all the other cells are both faithful explanations, so a model is scored against
           the better of the two, chosen once for all its methods and images; images without red cells, or
           with red cells only, are left out (docs/equations.md#known-truth)
shortcut   every cell has a random color, one random cell has a white mark; the class is the color of the
           marked cell. Given that cell, the class is independent of all others: no model can beat chance
           without it, and `subset_accuracy` shows that a trained model needs no other

    task = shortcut()
    model, accuracy = train(task, seed=0)             # about a minute on a CPU
    batch = task.draw(64, torch.Generator().manual_seed(1))       # batch.masks: 255 relevant, 0 not relevant
    values, side = score(task, maps, batch.masks)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn

from steadygaze.errors import InputError
from steadygaze.faithfulness.inputs import BACKGROUND, OBJECT, Batch, MetricInput
from steadygaze.faithfulness.localization import auroc
from steadygaze.faithfulness.metric import Metric, Values, add_metrics
from steadygaze.models.layers import small_vit
from steadygaze.vit.adapt import adapt
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.removal import Group, take


def truth(maps: Float[Tensor, "m b gh gw"], masks: UInt8[Tensor, "b h w"]) -> dict[str, Values]:
    """`truth_auroc` and `truth_precision` of every map."""
    grid = (maps.shape[-2], maps.shape[-1])
    relevant_by_image, labeled = relevant_patches(masks, grid)
    areas, precisions = [], []
    for image in range(maps.shape[1]):
        scores = maps[:, image].flatten(1)[:, labeled[image]]
        relevant = relevant_by_image[image][labeled[image]]
        areas.append(auroc(scores, relevant))
        n = int(relevant.sum())
        if 0 < n < len(relevant):
            top = scores.argsort(dim=1, descending=True, stable=True)[:, :n]
            precisions.append(100 * relevant[top].double().mean(1))
        else:
            precisions.append(torch.full_like(areas[-1], float("nan")))
    return {
        "truth_auroc": Values(torch.stack(areas, 1)),
        "truth_precision": Values(torch.stack(precisions, 1)),
    }


def relevant_patches(
    masks: UInt8[Tensor, "b h w"], grid: tuple[int, int]
) -> tuple[Bool[Tensor, "b p"], Bool[Tensor, "b p"]]:
    """(is relevant, has a labeled pixel) for each patch."""
    object_share = F.adaptive_avg_pool2d((masks == OBJECT)[:, None].double(), grid).flatten(1)
    background_share = F.adaptive_avg_pool2d((masks == BACKGROUND)[:, None].double(), grid).flatten(1)
    return object_share > background_share, (object_share + background_share) > 0


# -- registration


def compute(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    """Both metrics."""
    return truth(given.maps, given.masks)


def _entry(name: str, unit: str, high: float, summary: str) -> Metric:
    return Metric(
        name,
        unit,
        "higher",
        0,
        high,
        summary=summary,
        family="truth",
        by_map=True,
        compute=compute,
        needs_masks=True,
        uses_model=False,
    )


add_metrics(
    [
        _entry("truth_auroc", "", 1, "area under the ROC curve of the truly relevant patches"),
        _entry("truth_precision", "%", 100, "truly relevant ones among the top n patches, n their number"),
    ]
)


# RGB corners without black and white; red is the first
COLORS = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]]).float()
JITTER = 0.1  # random reduction of a cell's brightness, at most


@dataclass(frozen=True)
class Task:
    """A task of images with grid x grid cells, each `cell` pixels wide.

    Attributes:
        draw: (n, generator) -> n images normalized to -1..1, with labels, and masks of the relevant cells.
        two_sided: The marked cells and all the others are both faithful explanations.
        random_subsets: Train on random subsets of the patches too; the relevant ones are always kept.
    """

    name: str
    grid: int
    cell: int
    classes: int
    draw: Callable[[int, torch.Generator], Batch]
    two_sided: bool = False
    random_subsets: bool = False

    @property
    def size(self) -> int:
        """Side of an image in pixels."""
        return self.grid * self.cell


def counting(grid: int = 3, cell: int = 16) -> Task:
    """How many of the grid·grid cells are red? grid·grid + 1 classes, equally frequent."""
    cells = grid * grid

    def draw(n: int, generator: torch.Generator) -> Batch:
        labels = torch.randint(cells + 1, (n,), generator=generator)
        rank = torch.rand(n, cells, generator=generator).argsort(1).argsort(1)
        red = rank < labels[:, None]
        color = torch.randint(1, len(COLORS), (n, cells), generator=generator).masked_fill(red, 0)
        return _batch(_colored(color, grid, cell, generator), labels, red, grid, cell)

    return Task(f"counting {grid}x{grid}", grid, cell, cells + 1, draw, two_sided=True)


def shortcut(grid: int = 4, cell: int = 8, classes: int = 4) -> Task:
    """Which of `classes` colors has the cell with the white mark? Colors are independent and uniform."""
    cells = grid * grid

    def draw(n: int, generator: torch.Generator) -> Batch:
        color = torch.randint(classes, (n, cells), generator=generator)
        marked = F.one_hot(torch.randint(cells, (n,), generator=generator), cells).bool()
        images = _colored(color, grid, cell, generator)
        quarter = cell // 4
        inner = torch.zeros(cell, cell, dtype=torch.bool)
        inner[quarter : cell - quarter, quarter : cell - quarter] = True
        white = _pixels(marked, grid, cell) & inner.repeat(grid, grid)
        return _batch(images.masked_fill(white[:, None], 1.0), color[marked], marked, grid, cell)

    return Task(f"shortcut {grid}x{grid}", grid, cell, classes, draw, random_subsets=True)


def _colored(
    color: Int[Tensor, "n cells"], grid: int, cell: int, generator: torch.Generator
) -> Float[Tensor, "n 3 h w"]:
    shade = 1 - JITTER * torch.rand(*color.shape, 1, generator=generator)
    cells = (COLORS[color] * shade).unflatten(1, (grid, grid)).permute(0, 3, 1, 2)
    return cells.repeat_interleave(cell, 2).repeat_interleave(cell, 3)


def _pixels(chosen: Bool[Tensor, "n cells"], grid: int, cell: int) -> Bool[Tensor, "n h w"]:
    return chosen.unflatten(1, (grid, grid)).repeat_interleave(cell, 1).repeat_interleave(cell, 2)


def _batch(images: Tensor, labels: Tensor, relevant: Tensor, grid: int, cell: int) -> Batch:
    masks = _pixels(relevant, grid, cell).to(torch.uint8) * 255
    half = torch.full((3,), 0.5)
    return Batch((images - 0.5) / 0.5, labels, masks, half, half)


def train(
    task: Task,
    *,
    seed: int = 0,
    steps: int = 1500,
    batch_size: int = 128,
    width: int = 64,
    depth: int = 3,
    learning_rate: float = 1e-3,
    target_accuracy: float = 0.999,
) -> tuple[nn.Module, float]:
    """Train a small ViT on freshly drawn images: (model in eval mode, accuracy on 1000 held-out images).

    Stops early at `target_accuracy` on the held-out images. All randomness depends on `seed` alone.
    """
    model = small_vit(task.size, task.cell, task.classes, width=width, depth=depth, seed=seed)
    vit, generator = adapt(model), torch.Generator().manual_seed(seed)
    held_out = task.draw(1000, torch.Generator().manual_seed(seed + 1_000_000_007))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    model.train()
    with torch.enable_grad():
        for step in range(steps):
            data = task.draw(batch_size, generator)
            tokens = vit.embed(data.images)
            if task.random_subsets and step % 2:
                tokens = take(vit, tokens, _random_subset(data, task, generator))
            loss = F.cross_entropy(vit.logits(tokens), data.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 100 == 99 and _is_learned(model, task, held_out, target_accuracy):
                break
    model.zero_grad()
    return model.eval(), _accuracy(model, held_out)


def _is_learned(model: nn.Module, task: Task, held_out: Batch, target_accuracy: float) -> bool:
    if _accuracy(model, held_out) < target_accuracy:
        return False
    return not task.random_subsets or subset_accuracy(model, task, count=256)["only"] >= target_accuracy


def _random_subset(data: Batch, task: Task, generator: torch.Generator) -> Group:
    """The same random number of patches of each image, the relevant one always among them."""
    assert data.masks is not None
    relevant, _ = relevant_patches(data.masks, (task.grid, task.grid))
    count = int(torch.randint(1, task.grid**2, (1,), generator=generator))
    order = (torch.rand(relevant.shape, generator=generator) + relevant).argsort(1, descending=True)
    return Group(torch.arange(len(order)), order[:, :count])


def _accuracy(model: nn.Module, data: Batch) -> float:
    with torch.no_grad(), evaluation_mode(model):
        return float((model(data.images).argmax(1) == data.labels).double().mean())


def subset_accuracy(model: nn.Module, task: Task, *, count: int = 1000, seed: int = 123) -> dict[str, float]:
    """Accuracy on "whole" images, "without" the relevant patch and with it "only", and the "chance" level."""
    data, vit = task.draw(count, torch.Generator().manual_seed(seed)), adapt(model)
    assert data.masks is not None
    relevant, _ = relevant_patches(data.masks, (task.grid, task.grid))
    if not bool((relevant.sum(1) == 1).all()):
        raise InputError(
            f"subset_accuracy: expected a task with one relevant patch, such as shortcut(), got {task.name}"
        )
    order = relevant.double().argsort(dim=1, descending=True, stable=True)
    accuracy = {"whole": _accuracy(model, data), "chance": 1 / task.classes}
    with torch.no_grad(), evaluation_mode(model):
        tokens = vit.embed(data.images)
        for name, keep in (("only", order[:, :1]), ("without", order[:, 1:])):
            predicted = vit.logits(vit.select(tokens, keep)).argmax(1)
            accuracy[name] = float((predicted == data.labels).double().mean())
    return accuracy


def score(
    task: Task, maps: Float[Tensor, "m b gh gw"], masks: UInt8[Tensor, "b h w"]
) -> tuple[dict[str, Values], str]:
    """`truth_auroc` and `truth_precision` of M methods, and the relevant side: "marked" or "others".

    For a two-sided task this is the side with the higher mean AUROC over all methods and images.
    """
    sides = {"marked": truth(maps, masks)}
    if task.two_sided:
        sides["others"] = truth(maps, 255 - masks)
    mean_auroc = {side: float(v["truth_auroc"].value.nanmean().nan_to_num(0.0)) for side, v in sides.items()}
    best = max(mean_auroc, key=mean_auroc.__getitem__)
    return sides[best], best
