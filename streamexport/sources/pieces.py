"""Pieces of a tensor in row-major order, whatever its strides, without a copy of the whole."""

from collections.abc import Iterator

import torch

from streamexport.catalog import Copy, Segment


def copy_segment(tensor: torch.Tensor, segment: Segment, start: int, destination: torch.Tensor, copy: Copy) -> None:
    """Copy ``destination.numel()`` elements of a segment of ``tensor``, from the segment's element ``start`` on.

    Args:
        tensor: the segment's tensor, of any strides.
        segment: which of its elements.
        start: first of the segment's elements, in row-major order.
        destination: contiguous, 1-D.
        copy: see ``catalog.Copy``.
    """
    if segment.strides == (1,):
        copy_piece(tensor, segment.start + start, destination, copy)
    elif tensor.is_contiguous():
        offset = tensor.storage_offset() + segment.start
        copy_piece(tensor.as_strided(segment.shape, segment.strides, offset), start, destination, copy)
    else:
        done = 0
        for first, numel in runs_of_segment(segment, start, destination.numel()):
            copy_piece(tensor, first, destination[done : done + numel], copy)
            done += numel


def runs_of_segment(segment: Segment, start: int, numel: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of neighbouring elements of its tensor that a piece of a segment is made of: first, how many."""
    run = segment.shape[-1] if segment.strides[-1] == 1 else 1
    outer = list(zip(segment.shape, segment.strides, strict=True))[: -1 if run > 1 else None]
    row, start = divmod(start, run)
    while numel:
        first, rest = segment.start + start, row
        for size, stride in reversed(outer):
            rest, index = divmod(rest, size)
            first += index * stride
        count = min(run - start, numel)
        yield first, count
        numel -= count
        start = 0
        row += 1


def copy_piece(tensor: torch.Tensor, start: int, destination: torch.Tensor, copy: Copy) -> None:
    """Copy ``destination.numel()`` elements of ``tensor`` from its flat element ``start`` on.

    A strided tensor is cut into boxes of whole rows, and rows that are cut at the piece's ends into boxes of their
    own whole rows, so that a piece takes at most two copies per dimension and no temporary memory.

    Args:
        tensor: of any strides.
        start: first element, in row-major order of the shape.
        destination: contiguous, 1-D.
        copy: see ``catalog.Copy``.
    """
    numel = destination.numel()
    if tensor.is_contiguous():
        copy(destination, tensor.view(-1)[start : start + numel])
        return
    row_numel = tensor[0].numel()
    row, offset = divmod(start, row_numel)
    done = 0
    if offset:
        done = min(row_numel - offset, numel)
        copy_piece(tensor[row], offset, destination[:done], copy)
        row += 1
    rows = (numel - done) // row_numel
    if rows:
        box = destination[done : done + rows * row_numel].view(rows, *tensor.shape[1:])
        copy(box, tensor[row : row + rows])
        done += rows * row_numel
    if done < numel:
        copy_piece(tensor[row + rows], 0, destination[done:], copy)
