"""Pieces of a tensor in row-major order, whatever its strides, without a copy of the whole."""

import torch

from streamexport.catalog import Copy


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
