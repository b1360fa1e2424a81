import json
import os
import subprocess
import sys

import pytest
import torch
from oracles import assert_same, files, load
from test_engines import free_port

WORKER = """
import json, os, sys, threading
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from streamexport import RankError, export_sharded, plan_export
from streamexport.sources import gathering

out = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
told = {}

def build(kind, config, **options):
    torch.manual_seed(3)
    return kind(config(**sizes, num_key_value_heads=2, **options))

MODELS = {
    "llama": lambda: build(LlamaForCausalLM, LlamaConfig),
    "tied": lambda: build(LlamaForCausalLM, LlamaConfig, tie_word_embeddings=True),
    "mixtral": lambda: build(MixtralForCausalLM, MixtralConfig, num_local_experts=3),
}
for name, make in MODELS.items():
    if rank == 0:
        make().save_pretrained(out / name / "theirs", max_shard_size="1GB")
    model = make()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    held, real = [], gathering.GatheringSource.read
    def read(self, *args):
        real(self, *args)
        held.append(sum(tensor.nbytes for tensor in self._gathered.values()))
    gathering.GatheringSource.read = read
    report = export_sharded(model, out / name / "ours", "1GB", max_host_memory="256KiB")
    gathering.GatheringSource.read = real
    told[name] = {
        "report": report.to_json(), "held": max(held, default=0),
        "largest": max(p.numel() * p.element_size() for p in model.parameters()),
        "unchanged": all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters())),
    }
    export_sharded(model, out / name / "shards", "20KB", dtype="float16", tied="duplicate")
    export_sharded(model.state_dict(), out / name / "mapping")

mesh = init_device_mesh("cpu", (2,))
wide = torch.full((300, 70), 1e5)
mixed = {
    "plain": torch.ones(3), "replicated": distribute_tensor(wide, mesh, [Replicate()]),
    "rows": distribute_tensor(wide, mesh, [Shard(0)]), "columns": distribute_tensor(wide, mesh, [Shard(1)]),
    "odd": distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [Shard(0)]),
}
report = export_sharded(mixed, out / "mixed", dtype="float16", max_host_memory="256KiB")
told["mixed"] = report.warnings

def fail(event):
    raise OSError(28, "No space left on device")

try:
    export_sharded(model, out / "failed", "20KB", max_host_memory="256KiB", progress=fail if rank == 0 else False)
except (OSError, RankError) as error:
    told["failed"] = f"{type(error).__name__}: {error}"
export_sharded(model, out / "after")
(out / f"told-{rank}.json").write_text(json.dumps(told))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two processes that have exported models that FSDP2 has sharded over them."""
    out = tmp_path_factory.mktemp("sharded")
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, out],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output[-5000:]
    return out, [json.loads((out / f"told-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", ["llama", "tied", "mixtral"])
def test_a_sharded_model_is_written_as_save_pretrained_writes_it_whole(name, world):
    """D09, D45: byte for byte, converted experts and ties too; every rank returns the report and is as it was."""
    out, told = world
    assert files(out / name / "ours") == files(out / name / "theirs")
    for filename in files(out / name / "ours"):
        assert (out / name / "ours" / filename).read_bytes() == (out / name / "theirs" / filename).read_bytes()
    assert told[0][name]["report"] == told[1][name]["report"]
    assert told[0][name]["unchanged"]
    assert told[1][name]["unchanged"]


@pytest.mark.parametrize("name", ["llama", "tied", "mixtral"])
def test_a_tensor_is_gathered_when_it_is_needed_and_let_go(name, world):
    """Never the whole model: what overlaps the ring, and the largest."""
    _, told = world
    assert told[0][name]["largest"] <= told[0][name]["held"] < 256 * 1024 + 2 * told[0][name]["largest"]
    assert told[1][name]["held"] == 0


@pytest.mark.parametrize("name", ["llama", "tied", "mixtral"])
def test_casts_shards_and_mappings_of_sharded_tensors(name, world):
    """The same values in all of them."""
    out, _ = world
    whole = load(out / name / "theirs")
    head = {"lm_head.weight": whole["model.embed_tokens.weight"]} if name == "tied" else {}
    assert_same(load(out / name / "shards"), {key: value.half() for key, value in {**whole, **head}.items()})
    mapping = load(out / name / "mapping")
    assert sum(value.numel() for value in mapping.values()) == sum(value.numel() for value in whole.values())


def test_tensors_sharded_in_any_way_are_written_with_plain_ones(world):
    """Rows, columns, uneven, replicated; what overflows is counted for these, too."""
    out, told = world
    wide = torch.full((300, 70), float("inf"), dtype=torch.float16)
    expected = {"plain": torch.ones(3).half(), "odd": torch.arange(35.0).view(7, 5).half()}
    assert_same(load(out / "mixed"), {**expected, **dict.fromkeys(["replicated", "rows", "columns"], wide)})
    assert sum("21000 of its values" in warning for warning in told[1]["mixed"]) == 3


def test_a_failure_while_gathering_ends_all_ranks_and_the_next_export_works(world):
    """No rank is left in a collective."""
    out, told = world
    assert told[0]["failed"].startswith("OSError")
    assert told[1]["failed"].startswith("RankError: rank 0 failed: OSError")
    assert not (out / "failed").exists()
    assert_same(load(out / "after"), load(out / "mixtral/theirs"))
