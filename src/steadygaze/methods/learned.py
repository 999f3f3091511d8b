"""What learned methods share: their files, and the hidden states that they read, with equal tokens in each.

A file is one safetensors file with the weights, facts about them and the trainer's state. Nothing in it is
executed. The metadata key says which method wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from steadygaze.errors import CheckpointError
from steadygaze.files import write_atomic
from steadygaze.methods.registry import Method, parse_method
from steadygaze.vit.view import ViT


@dataclass(frozen=True)
class FileKind:
    """What a learned method calls its files.

    Attributes:
        key: Key of the metadata.
        content: What a file holds, such as "gates of Vision DiffMask".
        command: The command that trains them.
    """

    key: str
    content: str
    command: str

    def write(self, path: str | Path, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write facts and tensors, atomically."""
        from safetensors.torch import save

        plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, save(plain, metadata={self.key: json.dumps(about)}))

    def read(self, path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(facts, tensors) of a file that `write` wrote."""
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            what = f"{path}, a folder" if Path(path).is_dir() else f"{path}: no such file"
            raise CheckpointError(f"expected a file of {self.content} from `{self.command}`, got {what}")
        try:
            with safe_open(path, framework="pt") as file:
                about = (file.metadata() or {}).get(self.key)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file ({error})") from error
        if about is None:
            raise CheckpointError(f"{path} holds no {self.content}. Train them with `{self.command}`.")
        return json.loads(about), tensors


def changed_at(path: str | Path) -> int:
    """When a file was written; 0 if there is none. Part of the key under which its content is cached."""
    return Path(path).stat().st_mtime_ns if Path(path).is_file() else 0


def with_prefix(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    """The state of a module, its names starting with `prefix`."""
    return {f"{prefix}{name}": value for name, value in module.state_dict().items()}


def take_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the tensors whose names start with `prefix`, and return them without it."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors.pop(name) for name in names}


def with_files(methods: Sequence[str | Method], files: Mapping[str, Any]) -> list[str | Method]:
    """The methods, with each learned one reading its file in `files`; it is added if it was not requested.

    Args:
        files: By the method's name, such as {"diffmask": FILE}; None: no file is given. A calibration may be
            given as it is.
    """
    requested = list(methods)
    for name, file in files.items():
        if file is None:
            continue
        if not any(_stem(m) == name for m in requested):
            requested.append(name)
        requested = [_with_file(m, file) if _stem(m) == name else m for m in requested]
    return requested


def _stem(method: str | Method) -> str:
    return str(method).partition(":")[0]


def _with_file(method: str | Method, file: Any) -> Method:
    parsed = parse_method(method) if isinstance(method, str) else method
    if parsed.option("file") is not None:
        return parsed
    options = {**dict(parsed.options), "file": str(file) if isinstance(file, Path) else file}
    return replace(parsed, options=tuple(sorted(options.items())))


def hidden_states(vit: ViT, hidden: Sequence[Tensor]) -> list[Float[Tensor, "b t d"]]:
    """x⁰ .. x^L, the blocks' inputs and the last one's output.

    Plain ViTs: all tokens, prefix first. Hierarchical ones: the cells of the map's grid; the output only if
    the last block keeps the grid.
    """
    if vit.plan.global_attention:
        return list(hidden)
    layout = vit.layout(hidden[0])
    pairs = list(zip(vit.blocks, hidden[:-1], strict=True))
    if hidden[-1].shape[1] == hidden[-2].shape[1]:  # the last block keeps the grid
        pairs.append((vit.blocks[-1], hidden[-1]))
    return [on_grid(block.patches(x, layout), layout.grid) for block, x in pairs]


def on_grid(x: Float[Tensor, "b h w d"], grid: tuple[int, int]) -> Float[Tensor, "b t d"]:
    """The mean over each cell of the grid."""
    if tuple(x.shape[1:3]) != tuple(grid):
        x = F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), grid).permute(0, 2, 3, 1)
    return x.flatten(1, 2)
