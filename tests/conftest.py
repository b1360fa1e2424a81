import os

# Before any library reads them: nothing may reach for a network or a GPU, and no OpenMP team may spin.
os.environ.update(HF_HUB_OFFLINE="1", DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def tensors():
    """A few tensors of several dtypes, sizes and shapes, 1.3 MB in all."""
    return {
        "embed.weight": torch.randn(1000, 64),
        "layers.0.weight": torch.randn(300, 700).bfloat16(),
        "layers.0.bias": torch.randn(300).bfloat16(),
        "layers.10.weight": torch.randn(64, 1000).t(),
        "layers.2.count": torch.tensor(7),
        "mask": torch.rand(17, 33) > 0.5,
        "empty": torch.zeros(0, 5),
        "ids": torch.randint(-100, 100, (12345,), dtype=torch.int16),
    }
