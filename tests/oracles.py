"""What others write or read, for comparison."""

import json
import struct
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file, save_file


def expected_bytes(tensors, scratch: Path) -> bytes:
    """The file that safetensors itself writes for these tensors."""
    path = scratch / "oracle"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    return path.read_bytes()


def weight_map(directory: Path) -> dict[str, str]:
    """Tensor names to file names, as a loader finds them: the single file before an index."""
    if (directory / "model.safetensors").exists():
        with safetensors.safe_open(directory / "model.safetensors", "pt") as file:
            return dict.fromkeys(file.keys(), "model.safetensors")
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


def load(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory."""
    names = weight_map(directory)
    loaded = {}
    for filename in sorted(set(names.values())):
        loaded.update(load_file(directory / filename))
    assert loaded.keys() == names.keys()
    return loaded


def header(path: Path) -> dict:
    """A file's header."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length])


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Names, dtypes, shapes and bytes are equal."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        other = right[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        assert torch.equal(as_bytes(tensor), as_bytes(other)), name


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def files(directory: Path) -> set[str]:
    """Every path below a directory."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}
