"""One writer for each shard of a run folder.

| file | locked by |
| --- | --- |
| `.lock` | a whole run: alone; a shard: together with other shards |
| `.lock-00003of00016` | shard 3 of 16: alone |

Two numbers of shards deal out the batches differently, so they do not run at the same time: a shard takes its
own lock first and then looks for locks of another N. Of two that start in the same instant at least one is
refused.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from steadygaze.errors import BadInput
from steadygaze.files import LOCK, FileLock, is_locked, lock_folder
from steadygaze.runs.shards.shard import Shard, shard_of_file


def lock_run(folder: Path, shard: Shard) -> ExitStack:
    """Lock a run folder, which must exist, for a whole run or for one shard, until the result is closed."""
    with ExitStack() as locks:
        if not shard:
            locks.enter_context(lock_folder(folder))
            return locks.pop_all()
        locks.enter_context(FileLock(folder / LOCK, shared=True))
        locks.enter_context(FileLock(lock_file(folder, shard)))
        for path in sorted(folder.glob(f"{LOCK}-*of*")):
            other = shard_of_file(path)
            if other.count != shard.count and is_locked(path):
                raise BadInput(
                    f"{folder}: shard {other} is being written, and {shard} splits the run differently. Wait "
                    f"for the {other.count} shards, or choose another output folder.",
                    option="shard",
                )
        return locks.pop_all()


def lock_file(folder: Path, shard: Shard) -> Path:
    """The file that is locked while this shard is written."""
    return folder / "-".join(filter(None, (LOCK, shard.label)))
