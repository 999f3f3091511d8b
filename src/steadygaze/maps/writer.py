"""Writing maps: one file for each batch, written at once under a name that depends on its images only.

So a killed run leaves whole files, a resumed one writes the same file again instead of a second one, and
processes never write the same file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import BadInput, RowsNotWritten
from steadygaze.files import write_atomic
from steadygaze.maps.names import SCALE, SUFFIX, MapName, rounded


class MapWriter:
    """Writes maps in float16 into a folder, which is made if there is none.

    about: further metadata of every file, as texts
    """

    def __init__(self, folder: str | Path, about: Mapping[str, str] | None = None) -> None:
        self.folder, self.about = Path(folder), dict(about or {})

    def write(
        self,
        images: Sequence[str],
        maps: Mapping[MapName, Float[Tensor, "n h w"]],
        targets: Sequence[int] | None = None,
        broken: Mapping[MapName, Sequence[int]] | None = None,
    ) -> Path:
        """Write one file; returns its path.

        images: the key of each of the N images
        targets: the class that each map explains
        broken: positions of maps that are not finite; their values count as zero
        """
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {}
        for name, scores in maps.items():
            tensors[str(name)], tensors[f"{name}{SCALE}"] = rounded(scores)
        metadata: dict[str, Any] = {"images": list(images)}
        if targets is not None:
            metadata["targets"] = [int(target) for target in targets]
        if broken:
            metadata["broken"] = {str(name): list(positions) for name, positions in broken.items()}
        path = self.folder / f"maps-{self._digest(maps, images, targets)}{SUFFIX}"
        content = save(tensors, {**self.about, **{key: json.dumps(v) for key, v in metadata.items()}})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content)
        except FileExistsError as error:
            raise BadInput(f"maps: expected a folder to write to, got a file, {self.folder}") from error
        except OSError as error:
            raise RowsNotWritten(
                f"{path} could not be written: {error.strerror}. The maps before are intact; free some space "
                "and run the same command again to resume."
            ) from error
        return path

    @staticmethod
    def _digest(maps: Mapping[MapName, Tensor], images: Sequence[str], targets: Sequence[int] | None) -> str:
        identity = [[str(name) for name in maps], list(images), None if targets is None else list(targets)]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
