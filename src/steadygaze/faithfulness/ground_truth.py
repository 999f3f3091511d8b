"""Tasks made in memory whose true relevance is known, and a small ViT trained on them.

counting   grid x grid cells of pure colours; the class is the number n of red ones (Vision DiffMask). "The red ones" and "all the
           others" are both faithful answers, so a model is scored against the better of the two, chosen once for all its methods and
           pictures; n = 0 and n = all are left out (docs/equations.md#known-truth)
shortcut   every cell has a random colour, one random cell bears a white mark; the class is the colour of the marked cell. Given the
           marked cell, the class is independent of all others: without it no model can beat chance, and `proof` shows that with it
           alone the trained one is still right. So it is all that the model uses

    task = shortcut()
    model, accuracy = train(task, seed=0)             about a minute on a CPU
    batch = task.draw(64, torch.Generator().manual_seed(1))       batch.masks is the truth: 255 relevant, 0 not
    values, side = score(task, maps, batch.masks)
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn

from steadygaze.errors import BadInput
from steadygaze.faithfulness.metric import Batch, Values
from steadygaze.faithfulness.truth import patches, truth
from steadygaze.models.small_vit import small_vit
from steadygaze.vit import adapt
from steadygaze.vit.packing import Group, take
from steadygaze.vit.view import evaluation_mode

COLOURS = torch.tensor(
    [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]]
).float()  # bits, no black, no white; red first
JITTER = 0.1  # of the brightness of a cell, so that no two are quite the same


@dataclass(frozen=True)
class Task:
    """A task: `draw(n, generator)` makes n pictures of grid x grid cells, normalised to -1..1, with labels and truth as masks."""

    name: str
    grid: int
    cell: int
    classes: int
    draw: Callable[[int, torch.Generator], Batch]
    two_sided: bool = False  # "the marked ones" and "all the others" are both true
    drop: bool = False  # train on random subsets of the patches too, the relevant ones always among them

    @property
    def size(self) -> int:
        """Side of a picture in pixels."""
        return self.grid * self.cell


def counting(grid: int = 3, cell: int = 16) -> Task:
    """How many of the grid·grid cells are red? grid·grid + 1 classes, equally frequent."""
    cells = grid * grid

    def draw(n: int, generator: torch.Generator) -> Batch:
        labels = torch.randint(cells + 1, (n,), generator=generator)
        place = torch.rand(n, cells, generator=generator).argsort(1).argsort(1)
        red = place < labels[:, None]
        colour = torch.randint(1, len(COLOURS), (n, cells), generator=generator).masked_fill(red, 0)
        return _batch(_paint(colour, grid, cell, generator), labels, red, grid, cell)

    return Task(f"counting {grid}x{grid}", grid, cell, cells + 1, draw, two_sided=True)


def shortcut(grid: int = 4, cell: int = 8, classes: int = 4) -> Task:
    """Which of `classes` colours has the one cell with the white mark? All cells have colours, equally frequent and independent."""
    cells = grid * grid

    def draw(n: int, generator: torch.Generator) -> Batch:
        colour = torch.randint(classes, (n, cells), generator=generator)
        marked = F.one_hot(torch.randint(cells, (n,), generator=generator), cells).bool()
        images = _paint(colour, grid, cell, generator)
        quarter = cell // 4
        inner = torch.zeros(cell, cell, dtype=torch.bool)
        inner[quarter : cell - quarter, quarter : cell - quarter] = True
        white = _pixels(marked, grid, cell) & inner.repeat(grid, grid)
        return _batch(images.masked_fill(white[:, None], 1.0), colour[marked], marked, grid, cell)

    return Task(f"shortcut {grid}x{grid}", grid, cell, classes, draw, drop=True)


def _paint(
    colour: Int[Tensor, "n cells"], grid: int, cell: int, generator: torch.Generator
) -> Float[Tensor, "n 3 h w"]:
    shade = 1 - JITTER * torch.rand(*colour.shape, 1, generator=generator)
    picture = (COLOURS[colour] * shade).unflatten(1, (grid, grid)).permute(0, 3, 1, 2)
    return picture.repeat_interleave(cell, 2).repeat_interleave(cell, 3)


def _pixels(chosen: Bool[Tensor, "n cells"], grid: int, cell: int) -> Bool[Tensor, "n h w"]:
    return chosen.unflatten(1, (grid, grid)).repeat_interleave(cell, 1).repeat_interleave(cell, 2)


def _batch(images: Tensor, labels: Tensor, relevant: Tensor, grid: int, cell: int) -> Batch:
    masks = _pixels(relevant, grid, cell).to(torch.uint8) * 255
    half = torch.full((3,), 0.5)
    return Batch((images - 0.5) / 0.5, labels, masks, half, half)


def train(task: Task, *, seed: int = 0, steps: int = 1500, batch: int = 128, width: int = 64, depth: int = 3, rate: float = 1e-3,
          enough: float = 0.999) -> tuple[nn.Module, float]:  # fmt: skip
    """A small ViT trained on pictures that are drawn as they are needed: (model in evaluation mode, accuracy on 1000 unseen ones).

    Stops early once `enough` of 1000 unseen pictures are right. Everything random depends on `seed` alone.
    """
    model = small_vit(task.size, task.cell, task.classes, width=width, depth=depth, seed=seed)
    vit, generator = adapt(model), torch.Generator().manual_seed(seed)
    unseen = task.draw(1000, torch.Generator().manual_seed(seed + 1_000_000_007))
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps, pct_start=0.1)
    accuracy = 0.0
    model.train()
    with torch.enable_grad():
        for step in range(steps):
            data = task.draw(batch, generator)
            tokens = vit.embed(data.images)
            if task.drop and step % 2:
                tokens = take(vit, tokens, _subset(data, task, generator))
            loss = F.cross_entropy(vit.logits(tokens), data.labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            if step % 100 == 99:
                accuracy = _accuracy(model, unseen)
                if accuracy >= enough and (not task.drop or proof(model, task, count=256)["only"] >= enough):
                    break
    model.zero_grad()
    return model.eval(), _accuracy(model, unseen)


def _subset(data: Batch, task: Task, generator: torch.Generator) -> Group:
    """Of each picture the same random number of patches, the relevant one always among them."""
    assert data.masks is not None
    relevant, _ = patches(data.masks, (task.grid, task.grid))
    count = int(torch.randint(1, task.grid**2, (1,), generator=generator))
    order = (torch.rand(relevant.shape, generator=generator) + relevant).argsort(1, descending=True)
    return Group(torch.arange(len(order)), order[:, :count])


def _accuracy(model: nn.Module, data: Batch) -> float:
    with torch.no_grad(), evaluation_mode(model):
        return float((model(data.images).argmax(1) == data.labels).double().mean())


def proof(model: nn.Module, task: Task, *, count: int = 1000, seed: int = 123) -> dict[str, float]:
    """Accuracy on whole pictures, "without" the relevant patch and with it "only", both by true removal, and "chance"."""
    data, vit = task.draw(count, torch.Generator().manual_seed(seed)), adapt(model)
    assert data.masks is not None
    relevant, _ = patches(data.masks, (task.grid, task.grid))
    if not bool((relevant.sum(1) == 1).all()):
        raise BadInput(f"proof: expected a task with one relevant patch, such as shortcut(), got {task.name}")
    order = relevant.double().argsort(dim=1, descending=True, stable=True)
    found = {"whole": _accuracy(model, data), "chance": 1 / task.classes}
    with torch.no_grad(), evaluation_mode(model):
        tokens = vit.embed(data.images)
        for name, keep in (("only", order[:, :1]), ("without", order[:, 1:])):
            answer = vit.logits(vit.select(tokens, keep)).argmax(1)
            found[name] = float((answer == data.labels).double().mean())
    return found


def score(
    task: Task, maps: Float[Tensor, "m b gh gw"], masks: UInt8[Tensor, "b h w"]
) -> tuple[dict[str, Values], str]:
    """`truth_auroc` and `truth_precision` of M methods, and the side they are held against: "marked" or "others".

    For a two-sided task the side with the higher mean AUROC over all methods and pictures is taken: once for a model.
    """
    sides = {"marked": truth(maps, masks)}
    if task.two_sided:
        sides["others"] = truth(maps, 255 - masks)
    best = max(sides, key=lambda side: float(sides[side]["truth_auroc"].value.nanmean().nan_to_num(0.0)))
    return sides[best], best
