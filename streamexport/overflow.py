"""Values that a cast made infinite: counted, because a weight that has become inf is lost."""

import torch

from streamexport.catalog import Output, Segment, Source, runs_of
from streamexport.safetensors_format import TORCH_DTYPES
from streamexport.staging import Lane

_RANGE = {"F16": 0, "BF16": 1, "F32": 2, "F64": 3}
"""Dtypes by the size of their largest value."""

_SCRATCH_ELEMENTS = 64 * 1024
"""How many stored elements are looked at again at once: small change beside the ring."""


def count_overflows(piece: torch.Tensor, output: Output, first: int, source: Source, lane: Lane) -> int:
    """Return how many finite values of a tensor's piece have become infinite.

    Args:
        piece: elements as they will be written, arrived in host memory.
        output: the tensor.
        first: the piece's first element.
        source: where the stored values are read again, if there is anything infinite among the written ones.
        lane: how they get to the host.
    """
    target = _RANGE.get(output.spec.dtype)
    if target is None or not piece.numel() or _all_finite(piece):
        return 0
    count = 0
    for segment, begin, numel in runs_of(output.content, first, piece.numel()):
        stored = source.catalog.stored_dtype(segment.tensor) if isinstance(segment, Segment) else output.spec.dtype
        if isinstance(segment, Segment) and _RANGE.get(stored, -1) > target:
            scratch = torch.empty(min(numel, _SCRATCH_ELEMENTS), dtype=TORCH_DTYPES[stored])
            for done in range(0, numel, scratch.numel()):
                values = scratch[: min(scratch.numel(), numel - done)]
                source.read(segment, begin + done, values, lane.copy)
                lane.finish()
                count += int((values.isfinite() & piece[done : done + values.numel()].isinf()).sum())
        piece = piece[numel:]
    return count


def _all_finite(piece: torch.Tensor) -> bool:
    # Without a mask as long as the piece.
    lowest, highest = piece.aminmax()
    return bool(lowest.isfinite() and highest.isfinite())
