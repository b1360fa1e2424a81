"""Compare exporters on the same ZeRO-2-laid model: seconds until durable, and peak extra host memory.

    python benchmarks/compare.py [--size 2GiB] [--max-shard-size 500MB] [--rounds 5] [--exporters NAME ...]

Each exporter runs in a process of its own; rounds are interleaved, so that a disk that changes its pace does so for
all.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import GIB, OUT, FlatBuffer, PeakMemory, in_child, make_durable, save_results

from streamexport.sizes import parse_size

BLOCK = 32 * 1024**2
LAYER = {"hidden": 2048, "intermediate": 5632, "vocabulary": 32_000}


def laid_model(flat: torch.Tensor) -> torch.nn.Module:
    """Return a Llama whose parameters are views of the buffer, as many layers as fit, then a row of what is left."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, vocabulary = LAYER.values()
    layer = 4 * hidden * hidden + 3 * hidden * intermediate + 2 * hidden
    layers = (flat.numel() - 2 * vocabulary * hidden - hidden) // layer
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=max(layers, 1),
        num_attention_heads=16,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    start = 0
    for name, parameter in list(model.named_parameters()):
        owner, _, last = name.rpartition(".")
        view = flat[start : start + parameter.numel()].view(parameter.shape)
        setattr(model.get_submodule(owner), last, torch.nn.Parameter(view, requires_grad=False))
        start += parameter.numel()
    # Its buffers are not saved, and nothing of the model may be left on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model


def by_streamexport(model: torch.nn.Module, out: Path, limit: int) -> None:
    """Stream through the ring."""
    from streamexport import export_sharded

    export_sharded(model, out, limit, progress=False)


def by_save_pretrained(model: torch.nn.Module, out: Path, limit: int) -> None:
    """What a user calls on ``engine.module``."""
    model.save_pretrained(out, max_shard_size=limit)


def by_clone(model: torch.nn.Module, out: Path, limit: int) -> None:
    """What Trainer and accelerate do, on every rank."""
    state = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(out, state_dict=state, max_shard_size=limit)


def by_save_file(model: torch.nn.Module, out: Path, limit: int) -> None:
    """A careful script: plan on metadata, clone and save one shard after the other."""
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.torch import save_file

    state = model.state_dict()
    split = split_state_dict_into_shards_factory(
        state,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    out.mkdir()
    for filename, names in split.filename_to_tensors.items():
        save_file({name: state[name].detach().cpu().clone() for name in names}, out / filename, {"format": "pt"})


def by_checkpoint_writer(model: torch.nn.Module, out: Path, limit: int) -> None:  # noqa: ARG001 - it has no limit
    """torch.distributed.checkpoint's writer of Hugging Face's layout, without a process group."""
    import warnings

    import torch.distributed.checkpoint as dcp

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    files = {name: 1 + number * 4 // len(state) for number, name in enumerate(state)}
    writer = dcp.HuggingFaceStorageWriter(str(out), fqn_to_index_mapping=files, thread_count=2)
    dcp.save(state, storage_writer=writer, no_dist=True)


def ceiling(model: torch.nn.Module, out: Path, limit: int) -> None:
    """What the disk takes: aligned direct writes of the same bytes from memory, large blocks, by two threads."""
    flat = model.model.embed_tokens.weight.untyped_storage()
    out.mkdir()
    total = sum(parameter.nbytes for parameter in model.parameters())
    source = torch.empty(0, dtype=torch.uint8).set_(flat)
    blocks, descriptors = [], []
    for number, start in enumerate(range(0, total, limit // 4096 * 4096)):
        nbytes = min(limit // 4096 * 4096, total - start) // 4096 * 4096
        flags = os.O_WRONLY | os.O_CREAT | os.O_DIRECT
        descriptors.append(os.open(out / f"{number}", flags))
        blocks += [(descriptors[-1], at, start + at, min(BLOCK, nbytes - at)) for at in range(0, nbytes, BLOCK)]
    view = memoryview(source.numpy())
    waiting, lock = iter(blocks), threading.Lock()

    def write() -> None:
        while True:
            with lock:
                block = next(waiting, None)
            if block is None:
                return
            descriptor, at, start, nbytes = block
            assert os.pwrite(descriptor, view[start : start + nbytes], at) == nbytes

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for descriptor in descriptors:
        os.close(descriptor)


EXPORTERS: dict[str, Callable[[torch.nn.Module, Path, int], None]] = {
    "ceiling": ceiling,
    "streamexport": by_streamexport,
    "save_pretrained": by_save_pretrained,
    "clone + save_pretrained": by_clone,
    "plan + save_file": by_save_file,
    "DCP HuggingFaceStorageWriter": by_checkpoint_writer,
}


def child(name: str, descriptor: int, size: int, out: Path, limit: int) -> None:
    """Export once, in this process, and print what it took."""
    import transformers.conversion_mapping

    transformers.logging.set_verbosity_error()
    model = laid_model(FlatBuffer(size, descriptor).flat)
    # What others have long imported is not charged to anyone.
    import huggingface_hub  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch.distributed.checkpoint

    import streamexport.api  # noqa: F401

    # A model that was loaded has made transformers compile its conversions; this one was not loaded.
    transformers.conversion_mapping.get_checkpoint_conversion_mapping("llama")

    # Touch the weights: mapping their pages is this process's cost, and not the exporter's.
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    for parameter in model.parameters():
        parameter.view(torch.int16).flatten()[:: 4096 // 2].sum()
    os.sync()
    with PeakMemory() as memory:
        started = time.perf_counter()
        EXPORTERS[name](model, out, limit)
        make_durable(out)
        seconds = time.perf_counter() - started
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(json.dumps({"seconds": seconds, "bytes": nbytes, "written": written, "peak": memory.peak}))


def table(runs: dict[str, list[dict]]) -> list[dict]:
    """Return a row of medians for each exporter."""
    rates = {name: [run["bytes"] / run["seconds"] / GIB for run in found] for name, found in runs.items()}
    rows = []
    for name, found in runs.items():
        row = {
            "exporter": name,
            "seconds": statistics.median(run["seconds"] for run in found),
            "GiB/s": statistics.median(rates[name]),
            "peak MiB": statistics.median(run["peak"] for run in found) / 1024**2,
            "written": found[0]["written"],
        }
        for peer in ("ceiling", "save_pretrained"):
            if peer in runs:
                row[f"x {peer}"] = row["GiB/s"] / statistics.median(rates[peer])
                pairs = zip(rates[name], rates[peer], strict=True)
                row[f"x {peer}, by round"] = statistics.median(mine / theirs for mine, theirs in pairs)
        rows.append(row)
    return rows


def show(rows: list[dict]) -> None:
    """Print the table."""
    columns = f"{'seconds':>9}{'GiB/s':>8}{'x ceiling':>11}{'x save_pretrained':>19}{'peak extra MiB':>16}"
    print(f"\n{'exporter':<30}{columns}")
    for row in rows:
        peers = row.get("x ceiling", float("nan")), row.get("x save_pretrained", float("nan"))
        print(
            f"{row['exporter']:<30}{row['seconds']:>9.2f}{row['GiB/s']:>8.2f}{peers[0]:>11.2f}{peers[1]:>19.2f}"
            f"{row['peak MiB']:>16.0f}"
        )
        if row["exporter"] == "streamexport" and "x ceiling" in row:
            by_round = row["x ceiling, by round"], row.get("x save_pretrained, by round", float("nan"))
            print(f"{'  ratios as medians of rounds':<47}{by_round[0]:>11.2f}{by_round[1]:>19.2f}")


def draw(rows: list[dict]) -> Callable[[object, Path], None]:
    """Return what draws throughput and memory side by side."""

    def drawn(plt: object, path: Path) -> None:
        figure, panels = plt.subplots(1, 2, sharey=True, figsize=(11, 3.6), layout="constrained")
        names = [row["exporter"] for row in rows][::-1]
        colours = ["#1f77b4" if name == "streamexport" else "#b0b0b0" for name in names]
        for panel, key, label in [
            (panels[0], "GiB/s", "throughput until durable, GiB/s"),
            (panels[1], "peak MiB", "peak extra host memory, MiB"),
        ]:
            bars = panel.barh(names, [row[key] for row in rows][::-1], color=colours)
            panel.bar_label(bars, fmt="%.2f" if key == "GiB/s" else "%.0f", padding=3)
            panel.set_xlabel(label)
            panel.margins(x=0.15)
            panel.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=130)

    return drawn


def main() -> None:
    """Run all rounds, then show them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2GiB", help="bytes of weights")
    parser.add_argument("--max-shard-size", default="500MB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--exporters", nargs="+", choices=EXPORTERS, default=list(EXPORTERS))
    parser.add_argument("--dir", type=Path, default=OUT, help="where to write: the disk that is measured")
    options = parser.parse_args()
    size, limit = parse_size(options.size, "--size"), parse_size(options.max_shard_size, "--max-shard-size")
    buffer = FlatBuffer(size)
    buffer.fill()
    options.dir.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[dict]] = {name: [] for name in options.exporters}
    for number in range(options.rounds):
        for name in options.exporters:
            with tempfile.TemporaryDirectory(dir=options.dir) as directory:
                args = ("--child", name, buffer.descriptor, size, Path(directory) / "out", limit)
                runs[name].append(in_child(__file__, *args, descriptors=(buffer.descriptor,)))
                shutil.rmtree(Path(directory) / "out")
            # What is deleted is discarded by the disk when the journal is written: not in the next one's time.
            os.sync()
            run = runs[name][-1]
            rate = run["bytes"] / run["seconds"] / GIB
            print(f"round {number + 1}: {name:<30}{rate:>6.2f} GiB/s {run['peak'] / 1024**2:>7.0f} MiB", flush=True)
    rows = table(runs)
    show(rows)
    save_results("compare", {"options": vars(options) | {"dir": ""}, "rows": rows, "rounds": runs}, draw(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]), int(sys.argv[6]))
    else:
        main()
