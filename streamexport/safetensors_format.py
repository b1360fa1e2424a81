"""The safetensors file format as pure functions on names, dtypes and shapes.

A file is an 8-byte little-endian length, that many bytes of JSON padded with spaces, and the tensors' bytes, which
tile the rest without holes. This writer's choices (order by dtype then name, compact JSON, padding to 8 bytes)
are those of ``safetensors`` 0.8, so a file is equal to ``safetensors.torch.save_file``'s byte for byte.

Shapes here are torch's: ``float4_e2m1fn_x2`` packs two elements into one byte, and only the header doubles the
last dimension.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from streamexport.errors import FormatError

MAX_HEADER_BYTES = 100_000_000
"""The longest header that safetensors reads (``MAX_HEADER_SIZE`` in its Rust source)."""

METADATA = {"format": "pt"}
"""What loaders ask of a file from PyTorch: transformers, accelerate and MLX refuse or guess without it."""

_METADATA_KEY = "__metadata__"
_PACKED = "F4"

# In file order: by falling alignment, as safetensors' Dtype enumeration has it.
_TORCH_NAMES = {
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F32": "float32",
    "U32": "uint32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "U16": "uint16",
    "I16": "int16",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
    "F4": "float4_e2m1fn_x2",
    "BOOL": "bool",
}
_RANK = {name: rank for rank, name in enumerate(_TORCH_NAMES)}
# A torch that lacks one of the newer dtypes cannot have a tensor of it either.
TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name) for name, torch_name in _TORCH_NAMES.items() if hasattr(torch, torch_name)
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str | None:
    """Return the format's name of a torch dtype, or None where it has none (complex128, quantised types)."""
    return _NAMES.get(dtype)


@dataclass(frozen=True, slots=True)
class Extent:
    """One tensor's place in a file.

    Attributes:
        dtype: the format's name of the dtype.
        shape: torch's shape.
        start: offset of the first byte from the start of the file.
        stop: offset behind the last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """A header's bytes and what they say.

    Attributes:
        prefix: everything before the first tensor's first byte.
        extents: the tensors by name, in file order.
        nbytes: the size of the whole file.
    """

    prefix: bytes
    extents: Mapping[str, Extent]
    nbytes: int


def encode_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] = METADATA
) -> Header:
    """Lay out one file.

    Args:
        tensors: (name, dtype name, torch shape) of each tensor, in any order; at least one.
        metadata: what goes under ``__metadata__``: strings only, not empty.

    Raises:
        FormatError: nothing to write, a name or a metadata value the format cannot hold, or too long a header.
    """
    if not metadata or any(not isinstance(text, str) for pair in metadata.items() for text in pair):
        msg = f"metadata must map strings to strings and not be empty, not {dict(metadata)!r}"
        raise FormatError(msg)
    ordered = sorted(tensors, key=lambda tensor: (_RANK[tensor[1]], _utf8(tensor[0])))
    if not ordered:
        msg = "a safetensors file needs at least one tensor"
        raise FormatError(msg)
    entries: dict[str, object] = {_METADATA_KEY: dict(metadata)}
    offsets: list[tuple[int, int]] = []
    stop = 0
    for name, dtype, shape in ordered:
        if name in entries:
            msg = f"tensor name {name!r} cannot be written: " + (
                "the format keeps it for metadata" if name == _METADATA_KEY else "two tensors have it"
            )
            raise FormatError(msg)
        start, stop = stop, stop + tensor_nbytes(dtype, shape)
        offsets.append((start, stop))
        entries[name] = {"dtype": dtype, "shape": _file_shape(name, dtype, shape), "data_offsets": [start, stop]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        msg = f"a header of {len(text)} bytes, over the {MAX_HEADER_BYTES} allowed: use a smaller max_shard_size"
        raise FormatError(msg)
    prefix = len(text).to_bytes(8, "little") + text
    extents = {
        name: Extent(dtype, shape, len(prefix) + start, len(prefix) + stop)
        for (name, dtype, shape), (start, stop) in zip(ordered, offsets, strict=True)
    }
    return Header(prefix, extents, len(prefix) + stop)


def decode_header(prefix: bytes, file_size: int, path: str) -> Mapping[str, Extent]:
    """Return the tensors of a file, in file order, from its first bytes.

    Args:
        prefix: the file's first 8 bytes and its header.
        file_size: the size of the file in bytes.
        path: the file's path, for messages.

    Raises:
        FormatError: the header is not JSON of the right form, or its offsets do not tile the file exactly.
    """
    try:
        entries = json.loads(prefix[8:])
        entries.pop(_METADATA_KEY, None)
        found = {name: _decode_entry(entry, len(prefix)) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        msg = f"{path}: not a safetensors header ({error})"
        raise FormatError(msg) from error
    position = len(prefix)
    ordered = dict(sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)))
    for name, extent in ordered.items():
        if extent.start != position or extent.stop - extent.start != tensor_nbytes(extent.dtype, extent.shape):
            what = f"tensor {name!r} ({extent.dtype}, {list(extent.shape)})"
            msg = f"{path}: {what} has wrong offsets: bytes {extent.start} to {extent.stop} of the file"
            raise FormatError(msg)
        position = extent.stop
    if position != file_size:
        msg = f"{path}: the header describes {position} bytes and the file has {file_size}"
        raise FormatError(msg)
    return ordered


def header_length(first: bytes, file_size: int, path: str) -> int:
    """Return the length of a header, in bytes after the first 8, from those.

    Raises:
        FormatError: there are no 8 bytes, or they say more than the file or the format can hold.
    """
    length = int.from_bytes(first[:8], "little")
    if len(first) < 8 or length > min(MAX_HEADER_BYTES, file_size - 8):  # noqa: PLR2004
        msg = f"{path}: not a safetensors file: no header of a possible length in its {file_size} bytes"
        raise FormatError(msg)
    return length


def itemsize(dtype: str) -> int:
    """Return the bytes of one torch element of a dtype."""
    return TORCH_DTYPES[dtype].itemsize


def tensor_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor of that dtype and torch shape."""
    return math.prod(shape) * itemsize(dtype)


def _decode_entry(entry: Mapping[str, object], data_start: int) -> Extent:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in TORCH_DTYPES:
        msg = f"dtype {dtype!r} is none that this torch has"
        raise ValueError(msg)
    if not isinstance(shape, list) or not isinstance(offsets, list):
        msg = "shape and data_offsets must be lists"
        raise TypeError(msg)
    numbers = [*shape, *offsets]
    if any(not isinstance(number, int) or isinstance(number, bool) or number < 0 for number in numbers):
        msg = "shape and data_offsets must hold whole numbers from 0 up"
        raise ValueError(msg)
    if dtype == _PACKED:
        if not shape or shape[-1] % 2:
            msg = f"shape {shape} of {dtype} has no even last dimension"
            raise ValueError(msg)
        shape = [*shape[:-1], shape[-1] // 2]
    start, stop = offsets
    return Extent(dtype, tuple(shape), data_start + start, data_start + stop)


def _file_shape(name: str, dtype: str, shape: tuple[int, ...]) -> list[int]:
    if dtype != _PACKED:
        return list(shape)
    if not shape:
        msg = f"tensor {name!r}: a 0-dim float4_e2m1fn_x2 has no dimension to unpack into"
        raise FormatError(msg)
    return [*shape[:-1], shape[-1] * 2]


def _utf8(name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError as error:
        msg = f"tensor name {name!r} is not valid unicode and cannot be written"
        raise FormatError(msg) from error
