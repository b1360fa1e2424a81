"""Whole tensors in this process's memory or on its devices, by name."""

import sys
from collections.abc import Mapping
from typing import Any

import torch

from streamexport.catalog import Catalog, Copy, Segment, TensorSpec
from streamexport.errors import InvalidArgumentError
from streamexport.safetensors_format import dtype_name
from streamexport.sources.pieces import copy_segment

# Attributes by which libraries mark a packed weight whose meaning is elsewhere: bitsandbytes, DeepSpeed, HQQ.
_QUANTISED_MARKS = ("quant_state", "ds_quant_scale", "ds_quantized_shape", "CB", "SCB")
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


class TensorSource:
    """Tensors that are whole on this rank: a mapping's, a module's, or those of a ZeRO-0/1/2 engine."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        catalog: Catalog,
        companion_origin: object | None = None,
    ) -> None:
        self.catalog = catalog
        self.companion_origin = companion_origin
        self._tensors = {name: tensors[name].detach() for name in catalog.specs}
        self.devices = frozenset(tensor.device for tensor in self._tensors.values())

    def read(self, segment: Segment, start: int, destination: torch.Tensor, copy: Copy) -> None:
        """See ``catalog.Source``."""
        copy_segment(self._tensors[segment.tensor], segment, start, destination, copy)

    def close(self) -> None:
        """Nothing is open."""


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
    return TensorSource(tensors, Catalog(specs, aliases, problems=problems))


def spec_of(name: str, tensor: torch.Tensor, *, parameter: bool) -> TensorSpec:
    """Return a tensor's metadata; its dtype must be one the format can name."""
    dtype = dtype_name(tensor.dtype)
    if dtype is None:
        msg = f"tensor {name!r} has dtype {tensor.dtype}, which safetensors cannot name"
        raise InvalidArgumentError(msg)
    return TensorSpec(name, dtype, tuple(tensor.shape), parameter, trainable=tensor.requires_grad)


def whole_tensor(value: Any) -> Any:
    """Return a DTensor's local part where that is all of it: on a mesh of one device, or replicated on all.

    Anything else is returned as it is.
    """
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not isinstance(value, distributed.DTensor):
        return value
    if value.device_mesh.size() == 1 or all(placement.is_replicate() for placement in value.placements):
        return value.to_local()
    return value


def find_problem(tensor: object) -> str | None:
    """Return why a value cannot be exported as it is, or None."""
    if type(tensor).__name__ == "DTensor":
        return "it is a DTensor of which each rank holds a shard: gather a full state dict and export that"
    if not isinstance(tensor, torch.Tensor):
        return f"it is a {type(tensor).__name__}, not a tensor"
    if type(tensor) not in _PLAIN_TYPES:
        return f"it is a {type(tensor).__module__}.{type(tensor).__qualname__}, a tensor subclass of unknown layout"
    if tensor.is_meta:
        return "it is on the meta device and has no values: load or materialise it first"
    if mark := next((mark for mark in _QUANTISED_MARKS if hasattr(tensor, mark)), None):
        return f"it is quantised (it has a {mark}): dequantise the model first"
    if tensor.is_quantized:
        return f"it is quantised ({tensor.dtype}): dequantise the model first"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}: use .to_dense() first"
    if dtype_name(tensor.dtype) is None:
        return f"its dtype {tensor.dtype} has no name in the safetensors format"
    return None


def _placeholder_problem(name: str, tensor: torch.Tensor) -> str | None:
    """Return why a state dict's weight cannot be exported if it looks as ZeRO stage 3 leaves it (DeepSpeed 2413)."""
    if name.rpartition(".")[2] == "weight" and tuple(tensor.shape) == (0,):
        return "its shape is (0,), as ZeRO stage 3 leaves the weights that it has partitioned"
    return None


def _view_identity(tensor: torch.Tensor) -> object:
    if tensor.numel() == 0:
        return id(tensor)
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
