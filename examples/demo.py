"""Train a small Llama with DeepSpeed ZeRO-2 in two processes, export it, reload it, and show what that took.

``make demo`` runs this. It leaves in ``demo_out/``: ``model`` (the export), ``memory.png`` and ``report.json``. The
same weights are also saved the usual way, for comparison: every rank clones the state dict to host memory, rank 0
calls ``save_pretrained``. The exit code is 0 only if the reloaded model's logits equal the engine's bit for bit.
"""

import ctypes
import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

from typing_extensions import Self  # torch brings it; typing has it from Python 3.11 on

RANKS = 2
MAX_SHARD_SIZE = "50MB"
ROOT = Path(__file__).parents[1]
OUT = ROOT / "demo_out"
WORK = OUT / "work"
MB = 1e6


class HostMemory:
    """Samples this process's anonymous memory, above its level at the start, every few milliseconds."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Self:
        gc.collect()
        # What training freed must not hide what is allocated now: give it back to the system first.
        ctypes.CDLL(None).malloc_trim(0)
        self._start, self._base = time.perf_counter(), self._anonymous()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def peak(self) -> float:
        """The highest sample, in bytes."""
        return max(value for _, value in self.samples)

    def _sample(self) -> None:
        while True:
            self.samples.append((time.perf_counter() - self._start, self._anonymous() - self._base))
            if self._done.wait(0.005):
                return

    @staticmethod
    def _anonymous() -> float:
        with Path("/proc/self/status").open() as status:
            return next(float(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def train_and_export() -> None:
    """What each rank does; torchrun calls it."""
    import torch

    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= RANKS
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if on_gpu else "cpu")
    import deepspeed
    import torch.distributed as dist
    from deepspeed.utils import logger
    from transformers import LlamaConfig, LlamaForCausalLM

    from streamexport import export_sharded

    logger.setLevel(logging.ERROR)
    # Otherwise DeepSpeed compiles a communication kernel of its own, which takes longer than the whole demo.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", verbose=False)
    rank = dist.get_rank()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=7,
        num_attention_heads=12,
        num_key_value_heads=12,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    engine = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": True},
        },
    )[0]
    losses = []
    for step in range(3):
        torch.manual_seed(RANKS * step + rank)
        tokens = torch.randint(0, config.vocab_size, (1, 32), device=engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())

    # Both ways below start from the same state, and imports are not charged to either.
    import huggingface_hub  # noqa: F401
    import safetensors.torch  # noqa: F401

    dist.barrier()
    with HostMemory() as streamed:
        report = export_sharded(engine, OUT / "model", MAX_SHARD_SIZE, progress=False)
    dist.barrier()
    with HostMemory() as cloned:
        started = time.perf_counter()
        state = {name: tensor.detach().cpu().clone() for name, tensor in engine.module.state_dict().items()}
        if rank == 0:
            engine.module.save_pretrained(WORK / "usual", state_dict=state, max_shard_size=MAX_SHARD_SIZE)
            make_durable(WORK / "usual")
        dist.barrier()
        usual_seconds = time.perf_counter() - started
    del state

    facts = {
        "losses": losses,
        "streamed": streamed.samples,
        "streamed peak": streamed.peak,
        "cloned": cloned.samples,
        "cloned peak": cloned.peak,
        "usual seconds": usual_seconds,
    }
    if rank == 0:
        (OUT / "report.json").write_text(report.to_json())
        print(report, flush=True)
        facts["naive bytes"] = save_views(engine.module.state_dict())
        facts["logits equal"] = logits_equal(engine, config.vocab_size)
    (WORK / f"rank-{rank}.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


def make_durable(directory: Path) -> None:
    """Wait for the disk, as the export does by default."""
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def save_views(state: dict) -> int:
    """Return the bytes on disk when torch saves each shard of the live state dict: every file has the flat buffer."""
    import torch

    weight_map = json.loads((OUT / "model/model.safetensors.index.json").read_text())["weight_map"]
    nbytes = 0
    for shard in sorted(set(weight_map.values())):
        path = WORK / "views.bin"
        torch.save({name: state[name] for name in weight_map if weight_map[name] == shard}, path)
        nbytes += path.stat().st_size
        path.unlink()
    return nbytes


def logits_equal(engine: object, vocab_size: int) -> bool:
    """Reload the export and compare its logits with the engine's, bit for bit."""
    import torch
    from transformers import AutoModelForCausalLM

    live = engine.module.eval()
    reloaded = AutoModelForCausalLM.from_pretrained(OUT / "model").eval().to(live.device)
    tokens = torch.arange(0, vocab_size, vocab_size // 50, device=live.device)[None]
    with torch.no_grad():
        ours, theirs = reloaded(input_ids=tokens).logits, live(input_ids=tokens).logits
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def draw(ranks: list[dict]) -> None:
    """Draw host memory over time, both ways side by side."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, sharey=True, figsize=(11, 4.2), layout="constrained")
    ways = [("cloned", "clone, then save_pretrained"), ("streamed", "streamexport")]
    for panel, (key, title) in zip(panels, ways, strict=True):
        for rank, facts in enumerate(ranks):
            seconds, values = zip(*facts[key], strict=True)
            panel.plot(seconds, [value / MB for value in values], label=f"rank {rank}", linewidth=2)
        peak = max(facts[key + " peak"] for facts in ranks) / MB
        panel.axhline(peak, color="grey", linewidth=0.8, linestyle=":")
        panel.annotate(f"{peak:.0f} MB", (0.99, peak), xycoords=("axes fraction", "data"), ha="right", va="bottom")
        panel.set(title=title, xlabel="seconds")
        panel.grid(alpha=0.3)
        panel.legend(loc="center right")
    panels[0].set_ylabel("extra host memory, MB")
    panels[0].set_ylim(bottom=0, top=1.15 * max(facts["cloned peak"] for facts in ranks) / MB)
    figure.suptitle("Host memory while a ZeRO-2 engine's weights are saved")
    figure.savefig(OUT / "memory.png", dpi=130)


def show(ranks: list[dict], report: dict) -> None:
    """Print what it took, both ways."""
    usual = sum(path.stat().st_size for path in (WORK / "usual").glob("*.safetensors"))
    ours = sum(file["nbytes"] for file in report["files"] if file["tensors"])
    model = report["total_bytes"]
    leader = ranks[0]
    peaks = [" / ".join(f"{facts[key] / MB:.0f} MB" for facts in ranks) for key in ("streamed peak", "cloned peak")]
    rows = [
        ("", "streamexport", "clone + save_pretrained", "torch.save of views"),
        ("bytes on disk", f"{ours / MB:.1f} MB", f"{usual / MB:.1f} MB", f"{leader['naive bytes'] / MB:.1f} MB"),
        ("peak extra host memory, by rank", *peaks, ""),
        (
            "throughput, until durable",
            f"{report['bytes_per_second'] / MB:.0f} MB/s",
            f"{model / leader['usual seconds'] / MB:.0f} MB/s",
            "",
        ),
    ]
    print(f"\nmodel: {report['total_parameters']:,} parameters, {model / MB:.1f} MB in bf16")
    print("losses: " + ", ".join(f"{loss:.3f}" for loss in leader["losses"]) + "\n")
    for row in rows:
        print(f"{row[0]:<34}{row[1]:>18}{row[2]:>26}{row[3]:>22}")
    print(f"\nlogits of the reloaded model equal the engine's: {'yes' if leader['logits equal'] else 'NO'}")
    print(f"left in {OUT.name}/: model, memory.png, report.json")


def main() -> int:
    """Start the ranks, then show what they left."""
    for path in (OUT / "model", WORK):
        shutil.rmtree(path, ignore_errors=True)
    WORK.mkdir(parents=True)
    environment = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TQDM_DISABLE": "1",
    }
    print(f"training a Llama on {RANKS} ranks with ZeRO-2, then saving it in both ways ...", flush=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    log = WORK / "log.txt"
    with log.open("w") as errors:
        ranks = subprocess.run(
            [*launcher, __file__, "--rank"], env={**os.environ, **environment}, check=False, stderr=errors
        )
    if ranks.returncode:
        print(log.read_text()[-4000:], file=sys.stderr)
        return 1
    facts = [json.loads((WORK / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    draw(facts)
    show(facts, json.loads((OUT / "report.json").read_text()))
    shutil.rmtree(WORK)
    shards = list((OUT / "model").glob("model-*.safetensors"))
    return 0 if facts[0]["logits equal"] and len(shards) >= 4 else 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if "--rank" in sys.argv:
        train_and_export()
    else:
        sys.exit(main())
