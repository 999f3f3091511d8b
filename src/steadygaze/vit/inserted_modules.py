"""What inserted modules (`steadygaze.modules`) change in a plan; `mixes_tokens` marks them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from steadygaze.vit.view import Plan


def with_inserted(model: nn.Module, plan: Plan) -> Plan:
    """The plan of a model with inserted modules: these mix patches, which then can be masked but not removed.

    A block keeps its linear parts if nothing was inserted into its attention branch.
    """
    names = dict.fromkeys(str(m.spec["module"]) for m in model.modules() if _is_inserted(m))  # type: ignore[index]
    if not names:
        return plan
    blocks, kind = [_block(b) for b in plan.blocks], f"{plan.kind} with {' and '.join(names)}"
    return replace(plan, blocks=blocks, removable=False, mixed=True, kind=kind)


def _block(block: dict[str, Any]) -> dict[str, Any]:
    inside = [name for name, child in block["module"].named_children() if _is_inserted(child)]
    return block if set(inside) <= {"cb_mlp"} else {**block, "parts": None}


def _is_inserted(module: nn.Module) -> bool:
    return getattr(module, "mixes_tokens", False) is True
