"""The smallest complete DeepSpeed loop with an export at its end.

    python examples/deepspeed_loop.py OUT
    torchrun --nproc-per-node 2 examples/deepspeed_loop.py OUT

Every rank calls ``export_sharded``, between two optimizer steps; rank 0 writes.
"""

import os
import sys

import deepspeed
import torch
from torch import nn

from streamexport import export_sharded

# A process on its own is a world of one; torchrun sets these for each rank.
for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_PORT", "0" if os.environ["WORLD_SIZE"] == "1" else "29500")

if not torch.cuda.is_available():
    # On CPU, DeepSpeed would first compile a communication kernel of its own.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1000))
engine = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
    },
)[0]

for _ in range(5):
    tokens = torch.randint(0, 1000, (4, 16), device=engine.device)
    logits = engine(tokens)
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
    engine.backward(loss)
    engine.step()

report = export_sharded(engine, sys.argv[1], max_shard_size="200KB")
if torch.distributed.get_rank() == 0:
    print(report)
torch.distributed.destroy_process_group()
