"""Check the path from a GPU: right bytes, pinned memory, overlap, and throughput beside the machine's own ceilings.

    python benchmarks/gpu_check.py [--size 4GiB] [--rounds 3] [--dir DIR]

It needs torch, safetensors and huggingface_hub, and no DeepSpeed: the weights are views of one flat buffer on the
device, as ZeRO-2 leaves them. The exit code is 1 where there is no GPU or where a byte is wrong.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import GIB, OUT, PeakMemory, make_durable, views
from safetensors.torch import load_file, save_file

from streamexport import export_sharded
from streamexport.files import OutputFile
from streamexport.sizes import parse_size
from streamexport.staging import AcceleratorLane, Ring, buffer_bytes

LIMIT = 500 * 10**6


def check_bytes(directory: Path) -> list[str]:
    """Return which of several kinds of device tensors are not written as safetensors writes their host copies."""
    torch.manual_seed(0)
    base = torch.randn(3000, 4001, device="cuda")
    kinds = {
        "float32": ({"w": base}, None),
        "bfloat16 views": (views(torch.randn(60_000_000, device="cuda").bfloat16(), 100_000_000), None),
        "strided": ({"t": base.t(), "s": base[::3, 1::2], "c": base[0].expand(500, -1)}, None),
        "many small": ({f"b{i}": base[i % 3000, : i + 1] for i in range(2000)}, None),
        "cast": ({"w": base, "t": base.t(), "ids": torch.arange(99, device="cuda")}, torch.bfloat16),
        "host and device": ({"w": base, "h": torch.randn(777, 333).t()}, None),
    }
    wrong = []
    for name, (tensors, dtype) in kinds.items():
        export_sharded(tensors, directory / "out", "2TB", dtype=dtype, progress=False)
        host = {key: tensor.cpu() for key, tensor in tensors.items()}
        if dtype is not None:
            host = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in host.items()}
        save_file({key: tensor.contiguous() for key, tensor in host.items()}, directory / "oracle", {"format": "pt"})
        if (directory / "out/model.safetensors").read_bytes() != (directory / "oracle").read_bytes():
            wrong.append(name)
    return wrong


def check_step_order(directory: Path) -> bool:
    """Return whether an export sees what the device was still writing when it was asked for."""
    weight = torch.zeros(64 * 1024**2, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(500_000_000)  # noqa: SLF001 - the one way to keep a stream busy for a known time
        weight.fill_(1)
    export_sharded({"w": weight}, directory / "order", progress=False)
    return bool((load_file(directory / "order/model.safetensors")["w"] == 1).all())


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that some work takes, the device's part included."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def copy_only(flat: torch.Tensor) -> None:
    """Bring all bytes to one of the ring's buffers, and write nothing: the device-to-host ceiling."""
    slot = Ring(AcceleratorLane, buffer_bytes(None)).slots[0]
    for piece in flat.view(torch.uint8).split(slot.tensor.numel()):
        slot.lane.copy(slot.tensor[: piece.numel()], piece)
        slot.lane.finish()


def write_only(nbytes: int, directory: Path, direct: bool) -> None:
    """Write as many bytes of a buffer, and copy nothing: one thread's disk ceiling."""
    directory.mkdir()
    slot = Ring(AcceleratorLane, buffer_bytes(None)).slots[0]
    slot.tensor.random_()
    for number, start in enumerate(range(0, nbytes, LIMIT)):
        file = OutputFile(directory / str(number), direct=direct)
        for at in range(0, min(LIMIT, nbytes - start), len(slot.view)):
            file.write(slot.view[: min(LIMIT - at, nbytes - start - at, len(slot.view))], at)
        file.finish(fsync=True)


def measure(flat: torch.Tensor, directory: Path, rounds: int) -> dict:
    """Return medians of the export and of both of its halves alone."""
    tensors = views(flat, 8 * 1024**2)
    seconds: dict[str, list[float]] = {"export": [], "copy alone": [], "write alone": []}
    found = {}
    for number in range(rounds):
        for path in directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()
        seconds["copy alone"].append(timed(lambda: copy_only(flat)))
        with PeakMemory() as memory:
            started = time.perf_counter()
            report = export_sharded(tensors, directory / "export", LIMIT, progress=False)
            seconds["export"].append(time.perf_counter() - started)
        make_durable(directory / "export")
        direct = report.files[0].written == "direct"
        target = directory / f"write{number}"
        seconds["write alone"].append(
            timed(lambda target=target, direct=direct: write_only(flat.nbytes, target, direct))
        )
        found = {"pinned": report.pinned_bytes, "anonymous": memory.peak, "written": report.files[0].written}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    slower = max(medians["copy alone"], medians["write alone"])
    return {
        **found,
        "seconds": medians,
        "GiB/s": {name: flat.nbytes / value / GIB for name, value in medians.items()},
        "export / slower half": medians["export"] / slower,
        "hidden of the faster half": (medians["copy alone"] + medians["write alone"] - medians["export"])
        / min(medians["copy alone"], medians["write alone"]),
    }


def main() -> int:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="4GiB", help="bytes of weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=OUT, help="where to write")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU that torch can use", file=sys.stderr)
        return 1
    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        directory = Path(name)
        wrong, in_order = check_bytes(directory), check_step_order(directory)
        flat = torch.empty(parse_size(options.size, "--size") // 2, dtype=torch.bfloat16, device="cuda").normal_()
        results = measure(flat, directory, options.rounds)
    stats = getattr(torch.cuda, "host_memory_stats", dict)()
    results |= {
        "device": torch.cuda.get_device_name(),
        "wrong": wrong,
        "sees pending writes": in_order,
        "pinned by torch at most": stats.get("allocated_bytes.peak"),
    }
    print(json.dumps(results, indent=2))
    print(f"\n{'bytes':<28}{'WRONG: ' + ', '.join(wrong) if wrong else 'equal to save_file'}")
    print(f"{'pending writes':<28}{'seen' if in_order else 'MISSED'}")
    for name, rate in results["GiB/s"].items():
        print(f"{name:<28}{rate:.2f} GiB/s")
    print(f"{'export / slower half':<28}{results['export / slower half']:.2f}")
    return 1 if wrong or not in_order else 0


if __name__ == "__main__":
    sys.exit(main())
