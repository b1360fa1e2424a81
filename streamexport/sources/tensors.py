"""Whole tensors in this process's memory or on its devices, by name."""

import sys
from collections.abc import Callable, Mapping
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
        self.sharded: frozenset[str] = frozenset()
        self.devices = frozenset(tensor.device for tensor in self._tensors.values())

    def read(self, segment: Segment, start: int, destination: torch.Tensor, copy: Copy) -> None:
        """See ``catalog.Source``."""
        copy_segment(self._tensors[segment.tensor], segment, start, destination, copy)

    def release(self, tensor: str, numel: int) -> None:
        """Nothing is held."""

    def lead(self, needed: Mapping[str, int], announce: Callable[[], None]) -> None:
        """Nothing is gathered."""

    def follow(self, needed: Mapping[str, int], wait: Callable[[], bool]) -> None:
        """Nothing is gathered."""

    def close(self) -> None:
        """Nothing is open."""


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
    if not is_dtensor(value):
        return value
    if value.device_mesh.size() == 1 or all(placement.is_replicate() for placement in value.placements):
        return value.to_local()
    return value


def is_dtensor(value: object) -> bool:
    """Return whether it is a DTensor, without importing them."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(value, distributed.DTensor)


def find_problem(tensor: object) -> str | None:
    """Return why a value cannot be exported as it is, or None."""
    if not isinstance(tensor, torch.Tensor):
        return f"it is a {type(tensor).__name__}, not a tensor"
    if is_dtensor(tensor):
        if not (torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1):
            return "it is a DTensor of which other processes hold shards, and this one is alone"
    elif type(tensor) not in _PLAIN_TYPES:
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
