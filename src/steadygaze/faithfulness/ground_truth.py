"""ViTs with hand-set weights, whose answer and true patch importance are known in closed form.

A timm VisionTransformer of two blocks on 4 x 4 patches, its parameters set by formula
(docs/equations.md#hand-set). A patch shows one of a few glyphs, and the embedding maps each to its own
channel. The logits are (0, 4 · answer); the true importance of a patch is its Shapley value in the game
"logit of class 1 for a subset of the patches", all others removed after the embedding.

| task       | the answer is                               | true importance, in answers                  |
| count      | about n / (n + S) for n marks, S = 4        | equal shares                                 |
| either     | 1 if mark A or B is there (both are)        | 1/2 each: neither is needed, one is enough   |
| both       | 1 if mark A and mark B are there            | 1/2 each: an interaction, neither suffices   |
| largest    | the larger of two values, / 3               | larger − smaller/2 and smaller/2, / 3        |
| place      | 1 if a mark is at one place                 | 1 there, 0 for marks elsewhere               |
| carried    | 1 if a courier patch read a mark in block 0 | 1/2 each, though only the courier is read    |
| distractor | 1 if a mark is there; another is attended   | 1, and 0 for the attended distractor         |

| symbol | meaning                                                                         | in code      |
| u      | (C,) values of named channels; a token is (u, −u), so that its mean is zero     | `CHANNELS`   |
| E      | |u|², equal for all tokens: of complementary channels (yes, no) one is always 1 | `energy`     |
| R      | value of the channel "rest", which no weight reads; adds R² to E                | `REST`       |
| σ      | LayerNorm's deviation √(E/C + ε): a constant, by which weights are multiplied   | `_deviation` |
| K      | attention logits are −K, 0 (class token) or K: weights are 0 or 1 up to e^−K    | `SHARP`      |
| G      | gain of GELU, which is max(x, 0) at −G, 0 and G                                 | `GAIN`       |

With no glyph to attend to, a head attends to the class token. The last block subtracts what distinguishes the
tokens (every token attends to those that equal it), so that mean pooling reads what the class token reads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from steadygaze.errors import UnknownNameError
from steadygaze.faithfulness.inputs import MetricInput
from steadygaze.faithfulness.localization import ranks
from steadygaze.faithfulness.metric import Metric, Values, add_metrics
from steadygaze.models.layers import small_vit

Pool = Literal["token", "avg"]
GRID, CELL = 4, 8  # patches and pixels on a side
WIDTH, HEADS = 64, 4
SHARP, GAIN, SCALE, SINK, REST = 60.0, 20.0, 4.0, 4.0, 2.0
GLYPHS = ("blank", "A", "B", "distractor", "courier", "1", "2", "3")
POSITIONS = ("here", "elsewhere")
RESULTS = ("has A", "no A", "has B", "no B", "is 0", "is 1", "is 2", "is 3", "seen", "unseen", "yes", "no")
CHANNELS = ("class", *GLYPHS, *POSITIONS, *RESULTS, "rest")
WRITTEN_FIRST = ("class", *GLYPHS, *POSITIONS)  # by the embedding
NOTHING = 1e-4  # a map that varies by less is zero
HERE = 5  # the place of the task "place": second row, second column of a 4 x 4 grid


# -- circuits ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """An attention head that all tokens, or those with the channel `reader`, use in the same way.

    Attributes:
        logits: Attention logit of a key by its channel; 0 for the class token, −K for other patches.
        writes: Channel of the attended token -> channel that is written.
        reader: Only tokens with this channel attend by `logits`, the others to the class token.
    """

    logits: Mapping[str, float]
    writes: Mapping[str, str]
    reader: str | None = None


@dataclass(frozen=True)
class Neuron:
    """A hidden unit of an MLP: adds weight · max(Σ reads + bias, 0) to the channels that it writes."""

    reads: Mapping[str, float]
    bias: float
    writes: Mapping[str, float]


@dataclass(frozen=True)
class Task:
    """A question about the glyphs of an image, and the circuit that answers it.

    Attributes:
        players: Glyphs that matter; at the place `HERE` only, if `at_place`.
        answer: Number of present patches by player -> the answer, 0..1, in closed form.
        contents: Glyphs of the images, in turn; if `at_place`, the first glyph is at `HERE`.
        first: Heads of block 0.
        heads: Heads of block 1.
        neurons: MLP of block 1; `constants` are its output biases.
        reads: Channel -> weight of the classifier.
    """

    name: str
    question: str
    players: tuple[str, ...]
    answer: Callable[[Mapping[str, int]], float]
    contents: tuple[tuple[str, ...], ...]
    heads: tuple[Head, ...]
    first: tuple[Head, ...] = ()
    neurons: tuple[Neuron, ...] = ()
    constants: Mapping[str, float] = field(default_factory=dict)
    reads: Mapping[str, float] = field(default_factory=lambda: {"yes": 1.0})
    at_place: bool = False

    def draw(self, count: int, generator: torch.Generator, grid: int = GRID) -> Float[Tensor, "n 3 h w"]:
        """Images, normalized to mean 0 (gray): glyphs at random patches."""
        images = []
        for number in range(count):
            glyphs = self.contents[number % len(self.contents)]
            places = torch.randperm(grid * grid, generator=generator).tolist()
            if self.at_place:
                places.remove(HERE)
                places.insert(0, HERE)
            shown = dict(zip(places, glyphs, strict=False))
            images.append(_image([shown.get(place, "blank") for place in range(grid * grid)], grid))
        return torch.stack(images)

    def players_of(self, glyphs: Sequence[str]) -> list[str | None]:
        """The player that each patch is; None for a patch that changes nothing."""
        return [
            glyph if glyph in self.players and (not self.at_place or place == HERE) else None
            for place, glyph in enumerate(glyphs)
        ]

    def importance(self, glyphs: Sequence[str]) -> list[float]:
        """The Shapley value of each patch, in logits; exactly 0 for patches that change nothing."""
        players = self.players_of(glyphs)
        values = shapley_by_kind(lambda n: SCALE * self.answer(n), _count(players, self.players))
        return [0.0 if player is None else values[player] for player in players]


def _count(players: Sequence[str | None], kinds: Sequence[str]) -> dict[str, int]:
    return {kind: sum(player == kind for player in players) for kind in kinds}


def shapley_by_kind(
    value: Callable[[Mapping[str, int]], float], counts: Mapping[str, int]
) -> dict[str, float]:
    """Shapley values of a game that depends only on how many players of each kind are present.

    φ_t = Σ_k Π_s C(n_s − [s = t], k_s) · |k|! (N − |k| − 1)! / N! · (v(k + e_t) − v(k)); players of one kind
    have equal values. Kinds with no player have none.

    Examples:
        >>> shapley_by_kind(lambda n: float(n["a"] > 0 and n["b"] > 0), {"a": 1, "b": 2})
        {'a': 0.6666666666666666, 'b': 0.16666666666666666}
    """
    total = sum(counts.values())
    values = {}
    for kind in (kind for kind in counts if counts[kind]):
        others = {s: n - (s == kind) for s, n in counts.items()}
        phi = 0.0
        for present in itertools.product(*(range(n + 1) for n in others.values())):
            before = dict(zip(others, present, strict=True))
            size = sum(present)
            ways = math.prod(math.comb(others[s], k) for s, k in before.items())
            weight = ways * math.factorial(size) * math.factorial(total - size - 1) / math.factorial(total)
            phi += weight * (value({**before, kind: before[kind] + 1}) - value(before))
        values[kind] = phi
    return values


def _mark(glyph: str = "A", yes: str = "yes", no: str = "no") -> Head:
    return Head({glyph: SHARP}, {glyph: yes, "class": no})


def _share(marks: int) -> float:
    """The answer of the task count: attention n / (n + S) after the last LayerNorm."""
    p = marks / (marks + SINK)
    return p * _deviation(1.0) / _deviation(p * p + (1 - p) ** 2)


def _deviation(energy: float) -> float:
    """σ of LayerNorm for a token of this energy, without that of "rest"; ε is timm's."""
    return math.sqrt((energy + REST**2) / (WIDTH // 2) + 1e-6)


_BOTH_HEADS = (_mark("A", "has A", "no A"), _mark("B", "has B", "no B"))
TASKS = {
    task.name: task
    for task in (
        Task(
            "count",
            "How many marks are there?",
            ("A",),
            lambda n: _share(n["A"]),
            tuple(("B",) + ("A",) * n for n in range(1, 7)),
            (Head({"A": 0.0, "class": math.log(SINK)}, {"A": "yes", "class": "no"}),),
        ),
        Task(
            "either",
            "Is mark A or mark B there?",
            ("A", "B"),
            lambda n: float(n["A"] + n["B"] > 0),
            (("A", "B", "courier"),),
            _BOTH_HEADS,
            neurons=(Neuron({"has A": -1, "has B": -1}, 1, {"yes": -1, "no": 1}),),  # 1 − max(1 − a − b, 0)
            constants={"yes": 1},
        ),
        Task(
            "both",
            "Are mark A and mark B there?",
            ("A", "B"),
            lambda n: float(n["A"] > 0 and n["B"] > 0),
            (("A", "B", "courier"),),
            _BOTH_HEADS,
            neurons=(Neuron({"has A": 1, "has B": 1}, -1, {"yes": 1, "no": -1}),),  # max(a + b − 1, 0)
            constants={"no": 1},
        ),
        Task(
            "largest",
            "Which is the larger of two values?",
            ("1", "2", "3"),
            lambda n: max((int(level) for level in n if n[level]), default=0) / 3,
            (("1", "2", "A"), ("1", "3", "A"), ("2", "3", "A")),
            (
                Head(
                    {str(level): level * SHARP for level in (1, 2, 3)},
                    {"class": "is 0", "1": "is 1", "2": "is 2", "3": "is 3"},
                ),
            ),
            reads={"is 1": 1 / 3, "is 2": 2 / 3, "is 3": 1.0},
        ),
        Task(
            "place",
            "Is a mark in the second row and column?",
            ("A",),
            lambda n: float(n["A"] > 0),
            (("A", "A", "A"),),
            (
                Head(
                    {"A": 0.0, "here": SHARP, "elsewhere": -SHARP, "class": SHARP}
                    | dict.fromkeys(("blank", "B", "distractor", "courier", "1", "2", "3"), -2 * SHARP),
                    {"A": "yes", "class": "no"},
                ),
            ),
            at_place=True,
        ),
        Task(
            "carried",
            "Has the courier read a mark?",
            ("A", "courier"),
            lambda n: float(n["A"] > 0 and n["courier"] > 0),
            (("A", "courier", "B"),),
            (Head({"courier": SHARP}, {"has A": "yes", "no A": "no"}),),
            first=(Head({"A": SHARP}, {"A": "has A", "class": "no A"}, reader="courier"),),
        ),
        Task(
            "distractor",
            "Is a mark there?",
            ("A",),
            lambda n: float(n["A"] > 0),
            (("A", "distractor"),),
            (_mark(), _mark("distractor", "seen", "unseen")),
        ),
    )
}


# -- images --------------------------------------------------------------------------------------------


def _patterns() -> Float[Tensor, "glyphs 3 cell cell"]:
    """Pixels of the glyphs, −1 to 1; a blank patch is 0, gray."""
    row, column = torch.meshgrid(torch.arange(CELL), torch.arange(CELL), indexing="ij")
    middle = (row - 3.5).abs(), (column - 3.5).abs()
    frame = torch.maximum(*middle)
    shapes = {
        "A": ((middle[0] < 1) | (middle[1] < 1), (1, -1, -1)),  # red plus
        "B": ((middle[0] - middle[1]).abs() < 1, (-1, -1, 1)),  # blue cross
        "distractor": ((row + column) % 2 == 0, (1, 1, 1)),  # white checkerboard
        "courier": ((frame > 2) & (frame < 3), (1, 1, -1)),  # yellow frame
        "1": (row > 5, (-1, 1, -1)),  # green columns of rising height
        "2": (row > 3, (-1, 1, -1)),
        "3": (row > 1, (-1, 1, -1)),
    }
    patterns = [torch.zeros(3, CELL, CELL, dtype=torch.float64)]
    patterns += [
        shapes[glyph][0] * torch.tensor(shapes[glyph][1], dtype=torch.float64)[:, None, None]
        for glyph in GLYPHS[1:]
    ]
    return torch.stack(patterns)


@cache
def _dual() -> Float[Tensor, "glyphs pixels"]:
    """Pixels of a patch -> coefficient of each glyph but the blank one."""
    return torch.linalg.pinv(_patterns()[1:].flatten(1).T)


def _image(glyphs: Sequence[str], grid: int) -> Float[Tensor, "3 h w"]:
    patches = _patterns()[[GLYPHS.index(glyph) for glyph in glyphs]].float()
    return patches.unflatten(0, (grid, grid)).permute(2, 0, 3, 1, 4).reshape(3, grid * CELL, grid * CELL)


# -- weights -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What is known about a hand-set model; the model's attribute `ground_truth`."""

    task: Task
    pool: Pool
    grid: int

    def glyphs(self, images: Float[Tensor, "b 3 h w"]) -> list[list[str]]:
        """The glyph of each patch of each image."""
        g, side = self.grid, CELL
        patches = images.double().cpu().reshape(-1, 3, g, side, g, side).permute(0, 2, 4, 1, 3, 5)
        found = patches.reshape(len(images), g * g, -1) @ _dual().T
        kind = torch.where(found.amax(-1) > 0.5, found.argmax(-1) + 1, 0)
        return [[GLYPHS[k] for k in row] for row in kind.tolist()]

    def logits(
        self, images: Float[Tensor, "b 3 h w"], keep: Bool[Tensor, "b p"] | None = None
    ) -> Float[Tensor, "b 2"]:
        """The closed form of the logits in float64, with the patches `keep` only."""
        values = []
        for number, glyphs in enumerate(self.glyphs(images)):
            players = self.task.players_of(glyphs)
            if keep is not None:
                kept = keep[number].tolist()
                players = [player for player, here in zip(players, kept, strict=True) if here]
            values.append([0.0, SCALE * self.task.answer(_count(players, self.task.players))])
        return torch.tensor(values, dtype=torch.float64)

    def importance(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b gh gw"]:
        """The true importance of each patch for class 1, in float64: exact Shapley values."""
        rows = [self.task.importance(glyphs) for glyphs in self.glyphs(images)]
        return torch.tensor(rows, dtype=torch.float64).unflatten(1, (self.grid, self.grid))

    def distractors(self, images: Float[Tensor, "b 3 h w"]) -> Bool[Tensor, "b gh gw"]:
        """Patches that are attended and not used."""
        rows = [[glyph == "distractor" for glyph in glyphs] for glyphs in self.glyphs(images)]
        return torch.tensor(rows).unflatten(1, (self.grid, self.grid))


def _vector(values: Mapping[str, float]) -> Float[Tensor, " c"]:
    u = torch.zeros(WIDTH // 2, dtype=torch.float64)
    for name, value in values.items():
        u[CHANNELS.index(name)] = value
    return u


def _token(values: Mapping[str, float]) -> Float[Tensor, " d"]:
    """(u, −u), what is added to a token."""
    u = _vector(values)
    return torch.cat([u, -u])


def _reader(values: Mapping[str, float], energy: float) -> Float[Tensor, " d"]:
    """A weight w with ⟨w, LN(token)⟩ = Σ values · u, for tokens of this energy."""
    return _token(values) * _deviation(energy) / 2


def hand_set_vit(task: str, pool: Pool = "token", grid: int = GRID) -> nn.Module:
    """A timm VisionTransformer that solves a task of `TASKS` with weights set by formula.

    Its attribute `ground_truth` (an `Answer`) has the closed form of its logits, and the true importance of
    the patches of any image that the task draws.

    Args:
        task: Name of the task.
        pool: "token", the head reads the class token, or "avg", the mean of the patches.
        grid: Patches on a side, 3 or more.

    Examples:
        >>> model = hand_set_vit("both")
        >>> images = TASKS["both"].draw(1, torch.Generator().manual_seed(0))
        >>> [round(x, 4) for x in model(images)[0].tolist()]
        [0.0, 4.0]
        >>> model.ground_truth.importance(images).max().item()
        2.0
    """
    if task not in TASKS:
        raise UnknownNameError("task", task, TASKS)
    circuit = TASKS[task]
    model: Any = small_vit(grid * CELL, CELL, 2, width=WIDTH, depth=2, heads=HEADS, pool=pool)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.fill_(1)
        _set_embedding(model, grid)
        _set_attention(model.blocks[0], circuit.first, 2.0)
        carried = [name for head in circuit.first for name in head.writes.values()]
        entering = 2.0 + len(circuit.first)
        _set_attention(model.blocks[1], circuit.heads, entering, erased=(*WRITTEN_FIRST, *carried))
        leaving = float(len(circuit.heads))
        _set_mlp(model.blocks[1], circuit, leaving)
        leaving += bool(circuit.neurons)
        model.head.weight[1] = SCALE * _reader(circuit.reads, leaving).to(model.head.weight)
    model.ground_truth = Answer(circuit, pool, grid)
    return model.eval()


def _set_embedding(model: Any, grid: int) -> None:
    change = torch.stack([_token({glyph: 1, "blank": -1}) for glyph in GLYPHS[1:]], 1)
    model.patch_embed.proj.weight.copy_((change @ _dual()).reshape(WIDTH, 3, CELL, CELL))
    model.patch_embed.proj.bias.copy_(_token({"blank": 1}))
    model.cls_token[0, 0] = _token({"class": 1}).to(model.cls_token)
    places = ["elsewhere", *("here" if place == HERE else "elsewhere" for place in range(grid * grid))]
    model.pos_embed[0] = torch.stack([_token({place: 1, "rest": REST}) for place in places]).to(
        model.pos_embed
    )


def _set_attention(block: Any, heads: Sequence[Head], energy: float, erased: Sequence[str] = ()) -> None:
    """`heads`, then idle ones, and as the last one that which subtracts the channels `erased`."""
    size = WIDTH // HEADS
    scale = math.sqrt(size)  # attention divides by it
    idle = Head({}, {})
    for number, head in enumerate((*heads, *[idle] * (HEADS - len(heads)))):
        rows = [slice(part * WIDTH + number * size, part * WIDTH + (number + 1) * size) for part in range(3)]
        query, key, value = (block.attn.qkv.weight[one] for one in rows)
        if erased and number == HEADS - 1:
            for k, name in enumerate(erased):
                query[k] = (scale * SHARP * _reader({name: 1}, energy)).to(query)
                key[k] = _reader({name: 1}, energy).to(key)
            _carry(block, number, value, {name: (name, -1.0) for name in erased}, energy)
            continue
        nothing = dict.fromkeys(GLYPHS, -SHARP)
        block.attn.qkv.bias[rows[0]][0] = scale
        if head.reader is None:
            key[0] = _reader({**nothing, **head.logits}, energy).to(key)
        else:
            key[0] = _reader(nothing, energy).to(key)
            query[1] = scale * _reader({head.reader: 1}, energy).to(query)
            key[1] = _reader({name: logit + SHARP for name, logit in head.logits.items()}, energy).to(key)
        _carry(block, number, value, {source: (to, 1.0) for source, to in head.writes.items()}, energy)


def _carry(
    block: Any, number: int, value: Tensor, writes: Mapping[str, tuple[str, float]], energy: float
) -> None:
    for k, (source, (written, weight)) in enumerate(writes.items()):
        value[k] = _reader({source: 1}, energy).to(value)
        block.attn.proj.weight[:, number * (WIDTH // HEADS) + k] = _token({written: weight}).to(value)


def _set_mlp(block: Any, task: Task, energy: float) -> None:
    for k, neuron in enumerate(task.neurons):
        block.mlp.fc1.weight[k] = GAIN * _reader(neuron.reads, energy).to(block.mlp.fc1.weight)
        block.mlp.fc1.bias[k] = GAIN * neuron.bias
        block.mlp.fc2.weight[:, k] = _token(neuron.writes).to(block.mlp.fc2.weight) / GAIN
    block.mlp.fc2.bias.copy_(_token(task.constants))


# -- metrics -------------------------------------------------------------------------------------------


def importance_correlation(
    maps: Float[Tensor, "m b gh gw"], importance: Float[Tensor, "b gh gw"]
) -> Float[Tensor, "m b"]:
    """Pearson correlation of maps with the true importance, −1..1; 0 for a map without differences.

    Examples:
        >>> true = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
        >>> importance_correlation(torch.stack([3 * true + 1, -true, 0 * true]), true)[:, 0].round(decimals=4)
        tensor([ 1., -1.,  0.], dtype=torch.float64)
    """
    m, t = (x.double().flatten(-2) for x in (maps, importance.expand_as(maps)))
    m, t = m - m.mean(-1, keepdim=True), t - t.mean(-1, keepdim=True)
    product = m.norm(dim=-1) * t.norm(dim=-1)
    return torch.where(product > 0, (m * t).sum(-1) / product.clamp_min(1e-300), 0.0).clamp(-1, 1)


def without_rounding(maps: Float[Tensor, "m b gh gw"]) -> Float[Tensor, "m b gh gw"]:
    """The maps, zeros where none of its scores is more than `NOTHING` away from their mean.

    The logit of the answer is about 4. Smaller differences are float32's rounding and LayerNorm's ε, and
    their correlation would be that of noise.
    """
    spread = (maps - maps.mean((-2, -1), keepdim=True)).abs().amax((-2, -1), keepdim=True)
    return torch.where(spread > NOTHING, maps, 0.0)


def importance_rank(
    maps: Float[Tensor, "m b gh gw"], importance: Float[Tensor, "b gh gw"]
) -> Float[Tensor, "m b"]:
    """Mean rank of the n patches of largest true importance, minus (n − 1)/2: 1 is best; ties share ranks.

    Examples:
        >>> true = torch.tensor([[[2.0, 2.0], [0.0, 0.0]]])
        >>> importance_rank(torch.stack([true, -true, 0 * true]), true)[:, 0].tolist()
        [1.0, 3.0, 2.0]
    """
    position = ranks(-maps.flatten(-2))
    true = importance.flatten(-2)
    top = (true == true.amax(-1, keepdim=True)).to(position)
    n = top.sum(-1)
    return (position * top).sum(-1) / n - (n - 1) / 2


def distractor_share(
    maps: Float[Tensor, "m b gh gw"], distractors: Bool[Tensor, "b gh gw"]
) -> Float[Tensor, "m b"]:
    """Percent of Σ|m| on patches that are attended and not used; NaN without any, or for a map of zeros.

    Examples:
        >>> there = torch.tensor([[[True, False], [False, False]]])
        >>> distractor_share(torch.tensor([[[[1.0, -3.0], [0.0, 0.0]]]]), there).item()
        25.0
    """
    size = maps.double().abs()
    share = 100 * (size * distractors).flatten(-2).sum(-1) / size.flatten(-2).sum(-1)
    return torch.where(distractors.flatten(-2).any(-1), share, float("nan"))


def compute(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    """The metrics that `names` lists, of a model whose attribute `ground_truth` is an `Answer`."""
    answer: Answer = given.vit.model.ground_truth  # type: ignore[assignment]
    images, device = given.batch.images, given.maps.device
    sign = torch.where(given.target == 1, 1.0, -1.0).to(device)[:, None, None]
    importance = answer.importance(images).to(device) * sign
    distractors = answer.distractors(images).to(device)
    maps = without_rounding(given.maps)
    values = {
        "importance_correlation": importance_correlation(maps, importance),
        "importance_rank": importance_rank(maps, importance),
        "distractor_share": distractor_share(maps, distractors),
    }
    return {name: Values(values[name]) for name in names}


def _entry(name: str, unit: str, better: Any, low: float, high: float, summary: str) -> Metric:
    return Metric(
        name,
        unit,
        better,
        low,
        high,
        summary=summary,
        family="truth",
        by_map=True,
        compute=compute,
        suite="ground_truth",
    )


NAMES = ("importance_correlation", "importance_rank", "distractor_share")
add_metrics(
    [
        _entry(NAMES[0], "", "higher", -1, 1, "Pearson correlation with the true importance of the patches"),
        _entry(NAMES[1], "", "lower", 1, math.inf, "rank of the truly most important patches; 1 is best"),
        _entry(NAMES[2], "%", "lower", 0, 100, "share of the map on patches that are attended and not used"),
    ]
)
