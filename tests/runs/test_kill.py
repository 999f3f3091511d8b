"""A run that is killed at any moment is resumed: its rows are those of an unbroken run, bit for bit.

Run as a script, this file is the run that gets killed: everything is imported once, then each attempt is a
fork that writes into the folder, slowly and in small pieces, until SIGKILL ends it. Every second kill comes
at a random time; the others strike within a write, after half a line, so that a busy machine tests both too.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

from helpers.runs import image_folder
from helpers.tiers import tiered


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks")
@pytest.mark.parametrize("kills", tiered([4, 20], [4]))
def test_killed_at_any_moment(tmp_path, kills):
    source = Path(__import__("steadygaze").__file__).parents[1]
    env = {
        **os.environ,
        "PYTHONPATH": f"{source}{os.pathsep}{Path(__file__).parents[1]}",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), str(kills)],
        env=env,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["kills"] == kills
    assert told["half lines"] >= told["within a write"] >= kills // 2, (
        "a kill within a write left no half line"
    )
    assert told["computed"] <= told["batches"] + told["kills"], "a batch that was reported was computed again"


def main(folder: Path, wanted_kills: int) -> None:
    import torch

    from steadygaze.data.images import read_image
    from steadygaze.runs import store
    from steadygaze.runs import verify as request

    torch.set_num_threads(1)
    request.store_map_samples = lambda *_: (
        None
    )  # comes after the last row: kills are to fall between the rows
    data = image_folder(folder / "data")
    log = folder / "computed"

    def ask(out: Path) -> request.VerifyRequest:
        return request.VerifyRequest(
            model="embedded", data=data, out=out, methods=["ixg", "rollout"], batch_size=2, ratios=[0.5, 0.9]
        )

    ready = request.prepare_verify(
        ask(folder)
    )  # the fork has the model already, as it would cost seconds in a new process
    assert read_image

    def attempt(out: Path, slow: bool, writes: int | None = None) -> None:
        real, compute = os.write, request.compute_rows

        def write(file, piece):  # a kill may fall between two pieces of a batch
            nonlocal writes
            time.sleep(0.002)
            if writes == 0 and bytes(piece[:1]) != b"\n":  # the end of a line has no half
                real(file, piece[: max(1, bytes(piece).index(b"\n") // 2)])
                os.kill(os.getpid(), signal.SIGKILL)
            if writes:
                writes -= 1
            return real(file, piece[:400])

        def counted(*arguments):
            with log.open("a") as opened:
                opened.write("x")
            return compute(*arguments)

        if slow:
            store.os = type("os", (), {**vars(os), "write": staticmethod(write)})
            request.compute_rows = counted
        request.run_verify(ask(out), prepared=ready)

    def rows(out: Path) -> list[bytes]:
        return sorted(
            line for file in out.glob("rows-*.jsonl") for line in file.read_bytes().splitlines(keepends=True)
        )

    began = time.monotonic()
    attempt(folder / "unbroken", slow=False)
    whole, wanted = time.monotonic() - began, rows(folder / "unbroken")
    chance, kills, within, half, runs = random.Random(0), 0, 0, 0, 0
    while kills < wanted_kills:
        runs += 1
        out, before = folder / f"broken{runs}", b""
        while True:
            writes = chance.randrange(20) if kills < wanted_kills and kills % 2 == 0 else None
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    attempt(out, slow=True, writes=writes)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            if kills < wanted_kills and writes is None:
                time.sleep(chance.uniform(0, 0.6 * whole))
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            file = out / "rows-00000.jsonl"
            now = file.read_bytes() if file.exists() else b""
            assert now.startswith(before), "a row that was reported is lost"
            before = now[: now.rfind(b"\n") + 1]
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0
                break
            kills += 1
            within += writes is not None
            half += now != before
        assert rows(out) == wanted
    print(
        json.dumps(
            {
                "kills": kills,
                "within a write": within,
                "half lines": half,
                "computed": len(log.read_text()),
                "batches": 12 * runs,
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
