"""Peak extra host memory of an export against the model's size, the shard limit and the largest tensor: flat lines.

    python benchmarks/memory_scaling.py [--size 2GiB]

Each point is an export in a process of its own; the peak is that of its anonymous memory, plus what it has pinned.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from measuring import OUT, FlatBuffer, PeakMemory, in_child, save_results, views

from streamexport.sizes import format_size, parse_size
from streamexport.staging import DEFAULT_HOST_MEMORY

MIB = 1024**2


def child(descriptor: int, size: int, out: str, limit: int, largest: int) -> None:
    """Export once, in this process, and print the peak."""
    source = views(FlatBuffer(size, descriptor).flat, largest)
    import streamexport.api

    with PeakMemory() as memory:
        report = streamexport.api.export_sharded(source, out, limit, progress=False)
    print(json.dumps({"peak": memory.peak + report.pinned_bytes, "shards": sum(f.tensors > 0 for f in report.files)}))


def measure(size: int, limit: int, largest: int) -> dict:
    """Return one point."""
    buffer = FlatBuffer(size)
    with tempfile.TemporaryDirectory(dir=OUT) as out:
        args = ("--child", buffer.descriptor, size, out, limit, largest)
        return in_child(__file__, *args, descriptors=(buffer.descriptor,))


def draw(series: dict[str, list[dict]]) -> Callable[[object, Path], None]:
    """Return what draws a panel for each series."""

    def drawn(plt: object, path: Path) -> None:
        figure, panels = plt.subplots(1, len(series), sharey=True, figsize=(11, 3.6), layout="constrained")
        for panel, (name, points) in zip(panels, series.items(), strict=True):
            xs, ys = [point["x"] / MIB for point in points], [point["peak"] / MIB for point in points]
            panel.plot(xs, ys, marker="o", linewidth=2)
            panel.axhline(DEFAULT_HOST_MEMORY / MIB, color="grey", linestyle=":", label="the ring")
            panel.set(xlabel=f"{name}, MiB", xscale="log")
            panel.grid(alpha=0.3)
        panels[0].set_ylim(0, 2 * DEFAULT_HOST_MEMORY / MIB)
        panels[0].set_ylabel("peak extra host memory, MiB")
        panels[0].legend()
        figure.savefig(path, dpi=130)

    return drawn


def main() -> None:
    """Measure the three series and show them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2GiB", help="bytes of the largest model")
    size = parse_size(parser.parse_args().size, "--size")
    OUT.mkdir(exist_ok=True)
    usual = {"size": size, "limit": 500 * 10**6, "largest": 8 * MIB}
    axes = {
        "model size": ("size", [size // 8, size // 4, size // 2, size]),
        "shard limit": ("limit", [50 * 10**6, 500 * 10**6, 5 * 10**9, 50 * 10**9]),
        "largest tensor": ("largest", [8 * MIB, 64 * MIB, size // 4, size // 4 * 3]),
    }
    series: dict[str, list[dict]] = {}
    print(f"{'varied':<16}{'value':>12}{'shards':>8}{'peak extra MiB':>16}")
    for name, (argument, values) in axes.items():
        series[name] = []
        for value in values:
            point = {"x": value, **measure(**usual | {argument: value})}
            series[name].append(point)
            print(f"{name:<16}{format_size(value):>12}{point['shards']:>8}{point['peak'] / MIB:>16.1f}", flush=True)
    save_results("memory_scaling", {"series": series}, draw(series))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
    else:
        main()
