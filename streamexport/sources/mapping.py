"""A mapping of names to tensors, such as a state dict."""

from collections.abc import Mapping
from typing import Any

import torch

from streamexport.catalog import Catalog, TensorSpec
from streamexport.errors import InvalidArgumentError
from streamexport.sources.gathering import tensor_source
from streamexport.sources.tensors import TensorSource, find_problem, is_dtensor, spec_of, whole_tensor


def mapping_source(tensors: Mapping[str, torch.Tensor]) -> TensorSource:
    """Return the source for a mapping of names to tensors, such as a state dict.

    Two names of one and the same view (storage, offset, shape and strides) are one tensor under two names. All
    tensors are held while they are compared and written, so that an address cannot be used again by a mapping that
    makes its values when asked; views that only overlap stay tensors of their own.

    Raises:
        InvalidArgumentError: a key that is not a string.
    """
    tensors = {name: whole_tensor(tensor) for name, tensor in tensors.items()}
    first: dict[object, str] = {}
    aliases: dict[str, str] = {}
    specs: dict[str, TensorSpec] = {}
    problems: dict[str, str] = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            msg = f"the mapping's keys must be tensor names: got {name!r}"
            raise InvalidArgumentError(msg)
        if problem := find_problem(tensor) or _placeholder_problem(name, tensor):
            problems[name] = problem
            continue
        specs[name] = spec_of(name, tensor, parameter=True)
        kept = first.setdefault(_view_identity(tensor), name)
        if kept != name:
            aliases[name] = kept
    return tensor_source(tensors, Catalog(specs, aliases, problems=problems))


def _placeholder_problem(name: str, tensor: torch.Tensor) -> str | None:
    """Return why a state dict's weight cannot be exported if it looks as ZeRO stage 3 leaves it (DeepSpeed 2413)."""
    if name.rpartition(".")[2] == "weight" and tuple(tensor.shape) == (0,):
        return "its shape is (0,), as ZeRO stage 3 leaves the weights that it has partitioned"
    return None


def _view_identity(tensor: torch.Tensor) -> object:
    if tensor.numel() == 0:
        return id(tensor)
    if is_dtensor(tensor):
        local: Any = tensor
        return tuple(tensor.shape), _view_identity(local.to_local())
    return (
        tensor.device,
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )
