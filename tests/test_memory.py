import json
import subprocess
import sys

import pytest

from streamexport.memory import MemoryMeter

MIB = 1024 * 1024
RING = 64 * MIB
ALLOWANCE = 24 * MIB

# What every measurement shares: tensors as views of one flat buffer in a shared mapping, as device memory would be
# (it is not anonymous), and a thread that reads RssAnon while an export runs.
PRELUDE = """
import gc, json, mmap, os, sys, threading, torch, streamexport.api
from streamexport import export_sharded

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

def flat(nbytes):
    fd = os.memfd_create("weights")
    os.ftruncate(fd, nbytes)
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.bfloat16)

def views(nbytes, largest):
    buffer, made, at = flat(nbytes), {}, 0
    for size in [largest] + [8 << 20] * (nbytes // (8 << 20)):
        numel = min(size, nbytes - at * 2) // 2
        if numel:
            made[f"layer.{len(made)}.weight"] = buffer[at : at + numel].view(-1, 1024)
            at += numel
    return made

def peak_of(work):
    gc.collect()
    base, peak, done = anonymous(), [0], threading.Event()
    def sample():
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous() - base)
    thread = threading.Thread(target=sample)
    thread.start()
    report = work()
    done.set()
    thread.join()
    return {"peak": peak[0], "reported": report.anonymous_bytes, "pinned": report.pinned_bytes}
"""


def measure(script, *args):
    """Run a script in a process of its own; return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script, *map(str, args)], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


EXPORT = """
source = views(int(sys.argv[2]), int(sys.argv[4]))
limit, options = int(sys.argv[3]), json.loads(sys.argv[5])
print(json.dumps(peak_of(lambda: export_sharded(source, sys.argv[1], limit, **options))))
"""


@pytest.mark.parametrize(
    ("model", "limit", "largest"),
    [(512, 125, 8), (512, 50_000, 8), (512, 125, 384), (128, 125, 8)],
    ids=["many shards", "one shard", "one large tensor", "a smaller model"],
)
@pytest.mark.parametrize("direct", [True, False])
def test_extra_memory_is_the_ring_whatever_the_model_shards_and_tensors(model, limit, largest, direct, tmp_path):
    """D01, D03: the ring and small change; the report's own figure agrees."""
    options = json.dumps({"direct_io": direct})
    found = measure(EXPORT, tmp_path / "out", model * MIB, limit * 10**6, largest * MIB, options)
    assert RING * 0.9 < found["peak"] < RING + ALLOWANCE
    assert abs(found["reported"] - found["peak"]) < ALLOWANCE
    assert found["pinned"] == 0


def test_a_smaller_budget_takes_less(tmp_path):
    """And a cast stays within it."""
    options = json.dumps({"max_host_memory": "8MiB", "dtype": "float32"})
    found = measure(EXPORT, tmp_path / "out", 256 * MIB, 10**9, 128 * MIB, options)
    assert found["peak"] < 8 * MIB + ALLOWANCE


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_strided_tensors_are_never_copied_whole(dtype, tmp_path):
    """A transposed and an expanded tensor, each of 256 MiB or more."""
    script = """
buffer = flat(256 << 20)
source = {"t": buffer.view(1 << 14, -1).t(), "e": buffer[: 1 << 13].expand(1 << 14, 1 << 13)}
options = json.loads(sys.argv[2])
print(json.dumps(peak_of(lambda: export_sharded(source, sys.argv[1], max_host_memory="16MiB", **options))))
"""
    found = measure(script, tmp_path / "out", json.dumps({"dtype": dtype}))
    assert found["peak"] < 16 * MIB + ALLOWANCE


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_re_sharding_reads_a_little_at_a_time(dtype, tmp_path):
    """D02, D07: neither file nor tensor is held; the source's pages are not mapped."""
    script = """
export_sharded(views(256 << 20, 128 << 20), sys.argv[1], fsync=False)
options = json.loads(sys.argv[3])
found = peak_of(lambda: export_sharded(sys.argv[1], sys.argv[2], "100MB", max_host_memory="16MiB", **options))
print(json.dumps(found))
"""
    found = measure(script, tmp_path / "in", tmp_path / "out", json.dumps({"dtype": dtype}))
    assert found["peak"] < 16 * MIB + ALLOWANCE


def test_experts_are_split_without_a_copy_of_what_is_fused(tmp_path):
    """D38: a fused tensor of 512 MiB becomes an expert's file entries; no shard is over the limit."""
    script = """
from transformers import MixtralConfig, MixtralForCausalLM
with torch.device("meta"):
    model = MixtralForCausalLM(MixtralConfig(
        vocab_size=1000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=1, num_attention_heads=8,
        num_local_experts=8, dtype=torch.bfloat16,
    ))
buffer, at = flat(sum(p.nbytes for p in model.parameters())), 0
for name, parameter in list(model.named_parameters()):
    owner, _, last = name.rpartition(".")
    view = buffer[at : at + parameter.numel()].view(parameter.shape)
    setattr(model.get_submodule(owner), last, torch.nn.Parameter(view, requires_grad=False))
    at += parameter.numel()
assert max(parameter.nbytes for parameter in model.parameters()) == 512 << 20
from streamexport import plan_export
plan_export(model)
print(json.dumps(peak_of(lambda: export_sharded(model, sys.argv[1], "100MB"))))
"""
    found = measure(script, tmp_path / "out")
    assert found["peak"] < RING + ALLOWANCE
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(sizes) > 8
    assert max(sizes) < 100 * 10**6


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_lora_is_merged_block_by_block(dtype, tmp_path):
    """A weight of 512 MiB, and its product is never whole."""
    script = """
import warnings
warnings.simplefilter("ignore")
from peft import LoraConfig, get_peft_model
model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
model[0].weight = torch.nn.Parameter(flat(512 << 20).view(1 << 14, 1 << 14), requires_grad=False)
model[0].in_features = model[0].out_features = 1 << 14
model = get_peft_model(model, LoraConfig(r=16, target_modules=["0"], init_lora_weights=False))
options = json.loads(sys.argv[2])
print(json.dumps(peak_of(lambda: export_sharded(model, sys.argv[1], lora="merge", **options))))
"""
    found = measure(script, tmp_path / "out", json.dumps({"dtype": dtype}))
    assert found["peak"] < RING + ALLOWANCE


def test_ten_exports_leave_nothing_behind(tmp_path):
    """D05: memory, open files and threads are the same after the third export and after the tenth."""
    script = """
source = views(64 << 20, 8 << 20)
levels = []
for number in range(10):
    export_sharded(source, sys.argv[1], "20MB", direct_io=bool(number % 2), max_host_memory="16MiB", fsync=False)
    gc.collect()
    levels.append((anonymous(), len(os.listdir("/proc/self/fd")), threading.active_count()))
print(json.dumps(levels))
"""
    levels = measure(script, tmp_path / "out")
    memory, files, threads = zip(*levels[2:], strict=True)
    assert max(memory) - min(memory) < 2 * MIB
    assert len(set(files)) == 1
    assert set(threads) == {1}


def test_the_meter_sees_anonymous_memory_and_not_mapped_files(tmp_path):
    """RSS alone would count both."""
    import mmap

    (tmp_path / "file").write_bytes(bytes(32 * MIB))
    meter = MemoryMeter()
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        meter.read()
        assert meter.peak < 4 * MIB
        with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
            held[::4096] = b"x" * (len(held) // 4096)
            meter.read()
    assert abs(meter.peak - 32 * MIB) < 4 * MIB
