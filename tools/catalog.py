"""Write src/steadygaze/assets/catalog.json, which listings and reports show without torch.

python tools/catalog.py          # write the file
python tools/catalog.py --check  # exit 1 if it is out of date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import steadygaze as sg
from steadygaze.faithfulness.metric import METRICS, in_table_order, metric
from steadygaze.runs.settings import metric_record
from steadygaze.training.recipe import read_recipe
from steadygaze.training.recipe_files import shipped_recipes

OUT = Path(__file__).parents[1] / "src" / "steadygaze" / "assets" / "catalog.json"


def content() -> str:
    listed: dict[str, Sequence[Any]] = {
        "methods": sg.list_methods(),
        "metrics": sg.list_metrics(),
        "suites": sg.list_suites(),
        "losses": sg.list_losses(),
    }
    made: dict[str, list[dict[str, object]]] = {
        kind: [asdict(info) for info in infos] for kind, infos in listed.items()
    }
    recipes = {name: read_recipe(name) for name in shipped_recipes()}
    made["recipes"] = [
        {
            "name": name,
            "about": recipe.about,
            "cost": recipe.cost,
            "result": recipe.result,
            "is_measured": recipe.is_measured,
        }
        for name, recipe in recipes.items()
    ]
    made["quantities"] = [
        {**metric_record(m), "family": m.family, "curve": None if m.curve is None else asdict(m.curve)}
        for m in map(metric, in_table_order(METRICS))
    ]
    return json.dumps(made, indent=1, ensure_ascii=False, default=str) + "\n"


def main() -> None:
    if "--check" in sys.argv:
        sys.exit(OUT.read_text(encoding="utf-8") != content())
    OUT.write_text(content(), encoding="utf-8")


if __name__ == "__main__":
    main()
