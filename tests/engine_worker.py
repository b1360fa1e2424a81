"""One rank of a world of real DeepSpeed engines: makes each scenario, exports it, and leaves what tests compare.

Run as ``python engine_worker.py OUT`` with RANK, WORLD_SIZE and the rest of torch.distributed's environment set.
Each scenario leaves in OUT/<name>: ours (the export), theirs (``save_pretrained`` of an untouched model with the same
weights; not for a module of our own), state.safetensors (the weights under every name) and facts-<rank>.json.
"""

import copy
import json
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from streamexport import StreamexportError, export_sharded

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
get_accelerator().is_fp16_supported = lambda: True  # slow without avx512_fp16, and right

LIMIT = "30KB"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Odd(nn.Module):
    """Sizes that no world size divides, frozen and zero-size parameters, and buffers of every kind."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(61, 13)
        self.frozen = nn.Linear(13, 17)
        self.frozen.requires_grad_(requires_grad=False)
        self.up = nn.Linear(13, 37)
        self.down = nn.Linear(37, 13, bias=False)
        self.norm = nn.LayerNorm(13)
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("steps", torch.tensor(3, dtype=torch.int64))
        self.register_buffer("mask", torch.arange(13) % 2 == 0)
        self.register_buffer("scratch", torch.zeros(99), persistent=False)

    def forward(self, input_ids, labels):
        hidden = self.norm(self.embed(input_ids))
        hidden = hidden + self.down(self.up(hidden)) * self.scale
        return (nn.functional.cross_entropy(hidden.float().view(-1, 13), labels.view(-1) % 13),)


def llama(*, tied):
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Scenario:
    stage: int
    dtype: str = "bf16"
    model: str = "llama"
    offload: bool = False
    groups: bool = False
    zero: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    goes_on: bool = False  # compare training with and without an export in between


SCENARIOS = {
    "stage0-bf16": Scenario(0, goes_on=True),
    "stage0-fp32": Scenario(0, "fp32", "tied"),
    "stage0-fp16": Scenario(0, "fp16", "odd"),
    "stage1-bf16": Scenario(1, goes_on=True),
    "stage1-fp32-offload": Scenario(1, "fp32", offload=True),
    "stage1-bf16-optimizer": Scenario(1, model="odd", config={"data_types": {"grad_accum_dtype": "fp32"}}),
    "stage2-bf16-tied": Scenario(2, model="tied", goes_on=True),
    "stage2-fp32": Scenario(2, "fp32"),
    "stage2-fp16": Scenario(2, "fp16", model="tied"),
    "stage2-bf16-offload": Scenario(2, offload=True, goes_on=True),
    "stage2-groups-round-robin": Scenario(2, model="odd", groups=True, zero={"round_robin_gradients": True}),
    "stage2-odd": Scenario(2, model="odd", groups=True),
}


def build(name):
    torch.manual_seed(5)
    return Odd() if name == "odd" else llama(tied=name == "tied")


def make_engine(scenario):
    model = build(scenario.model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if scenario.groups:
        parameters = [
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
            {"params": [p for p in parameters if p.dim() > 1][:2], "lr": 1e-2},
            {"params": [p for p in parameters if p.dim() > 1][2:]},
        ]
    zero = {"stage": scenario.stage, **scenario.zero}
    if scenario.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        **scenario.config,
    }
    if scenario.dtype != "fp32":
        config[scenario.dtype] = {"enabled": True}
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]


def train(engine, first, steps):
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(100 * step + dist.get_rank())
        ids = torch.randint(0, 61, (2, 9))
        loss = engine(input_ids=ids, labels=ids)[0]
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def state(engine):
    return {name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()}


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def identity(engine):
    """What an export must not touch: parameter objects, where their values are, gradients, train mode."""
    return [
        (name, id(p), p.data_ptr(), p.requires_grad, p.grad is None) for name, p in engine.module.named_parameters()
    ] + [engine.training, engine.global_steps]


def run(name, scenario, out):
    directory = out / name
    leader = dist.get_rank() == 0
    engine = make_engine(scenario)
    facts = {"optimizer": type(engine.optimizer).__name__, "losses": train(engine, 0, 2)}
    before, kept = state(engine), identity(engine)
    storages = {parameter.untyped_storage().data_ptr() for parameter in engine.module.parameters()}
    facts["storages"], facts["parameters"] = len(storages), len(list(engine.module.parameters()))
    report = export_sharded(engine, directory / "ours", LIMIT, max_host_memory="256KiB")
    facts["report"] = report.to_json()
    facts["unchanged"] = equal(before, state(engine)) and kept == identity(engine)
    facts["threads"] = [t.name for t in threading.enumerate() if t.name.startswith("streamexport")]
    facts["losses"] += train(engine, 2, 2)
    if leader:
        save_file(before, directory / "state.safetensors")
        if scenario.model != "odd":
            reference = make_reference(scenario, before)
            reference.save_pretrained(directory / "theirs", max_shard_size=LIMIT)
    if scenario.goes_on:
        straight = make_engine(scenario)
        facts["losses without"] = train(straight, 0, 4)
        facts["weights equal"] = equal(state(engine), state(straight))
    (directory / f"facts-{dist.get_rank()}.json").write_text(json.dumps(facts))


def make_reference(scenario, weights):
    """A model that DeepSpeed has not seen, with the engine's weights, as its user had it."""
    model = build(scenario.model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[scenario.dtype])
    model.load_state_dict(weights)
    return model


def refuse(out):
    """Stage 3 and failures: what every rank is told, and what is left behind."""
    rank, world = dist.get_rank(), dist.get_world_size()
    told = {}

    def attempt(name, call):
        try:
            call()
        except (StreamexportError, OSError) as error:
            told[name] = f"{type(error).__name__}: {error}"

    stage3 = make_engine(Scenario(3, zero={"stage3_param_persistence_threshold": 0}))
    attempt("engine", lambda: export_sharded(stage3, out / "stage3"))
    attempt("module", lambda: export_sharded(stage3.module, out / "stage3"))
    attempt("weights", lambda: export_sharded(stage3.module.state_dict(), out / "stage3"))
    engine = make_engine(Scenario(2))
    (out / "a-file").touch()
    attempt("disk", lambda: export_sharded(engine, out / "a-file"))
    attempt("one rank", lambda: export_sharded(engine, out / "x", dtype="no" if rank == world - 1 else None))
    attempt("plans", lambda: export_sharded(engine, out / "x", "1KB" if rank == 0 else "2KB"))
    if rank == 0:
        attempt("alone", lambda: export_sharded(engine, out / "x", peer_timeout=0.2))
    dist.barrier()
    if rank != 0:
        attempt("alone", lambda: export_sharded(engine, out / "x", peer_timeout=0.2))
    attempt("after", lambda: export_sharded(engine, out / "after"))
    (out / f"told-{rank}.json").write_text(json.dumps(told))


def main():
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    for name, scenario in SCENARIOS.items():
        run(name, copy.deepcopy(scenario), out)
        dist.barrier()
    refuse(out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
