"""What the benchmarks share: weights laid out as ZeRO-2 lays them, a child process for each measurement, memory."""

import ctypes
import gc
import json
import mmap
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

GIB = 1024**3
OUT = Path(__file__).parent / "out"


class FlatBuffer:
    """Weights in a shared mapping of a memfd, which stands in for device memory: it is not anonymous memory.

    The parent makes and fills it once; children inherit the descriptor and map the same pages.
    """

    def __init__(self, nbytes: int, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("weights", 0) if descriptor is None else descriptor
        os.ftruncate(self.descriptor, nbytes)
        self.flat = torch.frombuffer(mmap.mmap(self.descriptor, nbytes), dtype=torch.bfloat16)

    def fill(self) -> None:
        """Fill it with finite random values, the same each time."""
        torch.manual_seed(0)
        pattern = torch.randn(16 * 1024**2, dtype=torch.bfloat16)
        for piece in self.flat.split(pattern.numel()):
            piece.copy_(pattern[: piece.numel()])


def views(flat: torch.Tensor, largest: int, usual: int = 8 * 1024**2) -> dict[str, torch.Tensor]:
    """Return names and views of the whole buffer: one of ``largest`` bytes, the rest of ``usual`` bytes each."""
    made: dict[str, torch.Tensor] = {}
    start = 0
    while start < flat.numel():
        numel = min((usual if made else largest) // 2, flat.numel() - start)
        made[f"layers.{len(made)}.weight"] = flat[start : start + numel]
        start += numel
    return made


class PeakMemory:
    """The highest growth of this process's anonymous memory (``RssAnon``) in a block, read every few milliseconds."""

    peak = 0

    def __enter__(self) -> "PeakMemory":  # noqa: PYI034 - typing has Self from Python 3.11 on
        gc.collect()
        # What was freed before must not hide what is allocated now: give it back to the system first.
        ctypes.CDLL(None).malloc_trim(0)
        self._base = _anonymous()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, _anonymous() - self._base)


def _anonymous() -> int:
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def in_child(script: str, *args: object, descriptors: tuple[int, ...] = ()) -> dict:
    """Run a script of ours in a process of its own and return the JSON that it prints last."""
    done = subprocess.run(
        [sys.executable, script, *map(str, args)],
        check=True,
        stdout=subprocess.PIPE,
        pass_fds=descriptors,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
    )
    return json.loads(done.stdout.splitlines()[-1])


def make_durable(directory: Path) -> None:
    """Wait until all files in a directory are on disk, and their names."""
    for path in [*(path for path in directory.rglob("*") if path.is_file()), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def machine() -> dict:
    """What the figures were measured on."""
    return {
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "processor": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def save_results(name: str, results: dict, draw: Callable[[object, Path], None]) -> None:
    """Leave a benchmark's figures as JSON and as a picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    OUT.mkdir(exist_ok=True)
    (OUT / f"{name}.json").write_text(json.dumps({"machine": machine(), **results}, indent=2) + "\n")
    draw(plt, OUT / f"{name}.png")
    print(
        f"left in {OUT.relative_to(Path.cwd()) if OUT.is_relative_to(Path.cwd()) else OUT}: {name}.json, {name}.png"
    )
