"""FunnyBirds' protocol by naive loops, from the paper: one image, part, pixel and threshold at a time.

It reads the files itself. `logits(path)` and `explain(path, target)` (a map as a list of rows of scores) are
given.
"""

import json
import re
from itertools import chain, combinations
from pathlib import Path

from PIL import Image

PIECES = {
    "eye": [(255, 255, 253), (255, 255, 254)],
    "beak": [(255, 255, 0)],
    "foot": [(255, 0, 1), (255, 0, 2)],
    "wing": [(0, 255, 1), (0, 255, 2)],
    "tail": [(0, 0, 255)],
}
THRESHOLDS = [0.01 + k * 0.49 / 79 for k in range(80)]


def subsets(things):
    return [set(s) for s in chain.from_iterable(combinations(things, n) for n in range(1, len(things) + 1))]


def ranks(values):
    return [sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values]


def spearman(xs, ys):
    a, b = ranks(xs), ranks(ys)
    mean = (len(a) + 1) / 2
    top = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    bottom = (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5
    return top / bottom if bottom else None


def protocol(root: Path, logits, explain) -> dict[str, float]:
    """Every score of the paper, 0..1, and the threshold."""
    classes = [one["parts"] for one in json.loads((root / "classes.json").read_text())]
    parts = list(json.loads((root / "parts.json").read_text()))
    images = json.loads((root / "dataset_test.json").read_text())
    right, used, objects, sd, ts = [], 0, 0, [], []
    curves = {name: [[] for _ in THRESHOLDS] for name in ("csdc", "pc", "dc", "d")}
    for number, described in enumerate(images):
        label = described["class_idx"]
        file = root / "test" / str(label) / f"{number:06d}.png"
        folder = root / "test_interventions" / str(label) / f"{number:06d}"
        codes = Image.open(root / "test_part_map" / str(label) / f"{number:06d}.png").convert("RGB")
        field = next(value for key, value in described.items() if key.startswith("bg_"))
        count = len(re.findall(r"\b\d+\b", field))
        places = {}  # color -> its pixels
        for place, color in enumerate(codes.getdata()):
            places.setdefault(color, []).append(divmod(place, codes.width))
        colors = {**PIECES, **{k: [(204, 204, 204 + k)] for k in range(count)}}

        def importance(target, file=file, size=codes.size, places=places, colors=colors):
            """Of parts and background objects by name, and the sum of the map."""
            scores = explain(file, target)
            width, height = size

            def at(y, x):
                return scores[y * len(scores) // height][x * len(scores[0]) // width]

            found = {}
            for name, pieces in colors.items():
                found[name] = 0.0
                for color in pieces:
                    own = places.get(color, [])
                    near = {(y + i, x + j) for y, x in own for i in range(-2, 3) for j in range(-2, 3)}
                    near = {(y, x) for y, x in near if 0 <= y < height and 0 <= x < width}
                    found[name] += sum(at(y, x) for y, x in near)
            return found, sum(at(y, x) for y in range(height) for x in range(width))

        def without(removed, folder=folder):
            return logits(folder / f"body_{'_'.join(sorted(set(parts) - set(removed)))}.png")

        whole = logits(file)
        predicted = whole.index(max(whole))
        right.append(predicted == label)
        drop = {part: whole[label] - without([part])[label] for part in parts}
        for k in range(count):
            drop[k] = whole[label] - logits(folder / "background_interventions" / f"{k}.png")[label]
        irrelevant = {name for name, d in drop.items() if abs(d) < abs(0.05 * whole[label]) or d < 0}
        objects += count
        used += sum(k not in irrelevant for k in range(count))

        of_label, total = importance(label)
        of_predicted, predicted_total = (of_label, total) if predicted == label else importance(predicted)
        unique = [
            s
            for s in subsets(parts)
            if not any(
                all(other[p] == classes[label][p] for p in s) for c, other in enumerate(classes) if c != label
            )
        ]
        minimal = [s for s in unique if not any(t < s for t in unique)]
        for t, threshold in enumerate(THRESHOLDS):
            named = {name for name, e in of_label.items() if e > threshold * total}
            birds = {p for p in parts if of_predicted[p] > threshold * predicted_total}
            if predicted == label:
                curves["csdc"][t].append(max([len(s & named) / len(s) for s in minimal], default=0))
            alone, gone = without(set(parts) - birds), without(birds)
            curves["pc"][t].append(float(alone.index(max(alone)) == predicted))
            curves["dc"][t].append(float(gone.index(max(gone)) != predicted))
            if irrelevant:
                curves["d"][t].append(1 - len(named & irrelevant) / len(irrelevant))
        correlation = spearman([drop[p] for p in parts], [of_label[p] for p in parts])
        if correlation is not None:
            sd.append((1 + correlation) / 2)

        shared = [{p for p in parts if one[p] == classes[label][p]} for one in classes]
        near = [c for c in range(len(classes)) if len(parts) - len(shared[c]) == 3]
        pairs = [(a, b) for a in near for b in near if a < b and not shared[a] & shared[b]]
        if not pairs:
            continue
        a, b = min(pairs)
        less = [without(shared[a]), without(shared[b])]
        if less[0][a] - whole[a] < less[1][a] - whole[a] and less[1][b] - whole[b] < less[0][b] - whole[b]:
            of_a, of_b = importance(a)[0], importance(b)[0]
            ts.append(float(sum(of_a[p] for p in shared[a]) > sum(of_b[p] for p in shared[a])))
            ts.append(float(sum(of_a[p] for p in shared[b]) < sum(of_b[p] for p in shared[b])))

    means = {name: [sum(v) / len(v) for v in by_threshold] for name, by_threshold in curves.items()}
    com = [((c + p + d) / 3 + x) / 2 for c, p, d, x in zip(*means.values(), strict=True)]
    best = com.index(max(com))
    return {
        "accuracy": sum(right) / len(right),
        "background": 1 - used / objects,
        **{name: curve[best] for name, curve in means.items()},
        "com": com[best],
        "cor": sum(sd) / len(sd),
        "con": sum(ts) / len(ts),
        "threshold": THRESHOLDS[best],
    }
