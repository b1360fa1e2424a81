"""Follows operations that move elements about (split, transpose, reshape, join) without carrying them out.

A ``TracedTensor`` has a shape and a dtype but no values. What is done to it with torch's own operations is recorded
as where each element comes from: strided views of source tensors, joined along some dimension. So code that was
written for whole tensors tells what it would make of them, and that can then be read piece by piece.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from streamexport.catalog import Content, Join, Segment, TensorSpec, Zeros
from streamexport.safetensors_format import TORCH_DTYPES


class UntraceableError(Exception):
    """An operation whose result is no strided view, and no join of such. It never leaves the package."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A strided view of a source tensor's row-major elements; of zeros, where there is no tensor.

    Attributes:
        tensor: the source tensor's name, or None.
        start: the view's first element.
        dims: (size, stride) of each dimension.
    """

    tensor: str | None
    start: int
    dims: tuple[tuple[int, int], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for size, _ in self.dims)

    def permuted(self, order: Sequence[int]) -> "_Leaf":
        return _Leaf(self.tensor, self.start, tuple(self.dims[dim] for dim in order))

    def narrowed(self, dim: int, start: int, length: int) -> "_Leaf":
        stride = self.dims[dim][1]
        dims = (*self.dims[:dim], (length, stride), *self.dims[dim + 1 :])
        return _Leaf(self.tensor, self.start + start * stride, dims)

    def cut(self, dim: int, outer: int) -> "_Leaf":
        size, stride = self.dims[dim]
        inner = size // outer
        return _Leaf(
            self.tensor,
            self.start,
            (*self.dims[:dim], (outer, inner * stride), (inner, stride), *self.dims[dim + 1 :]),
        )

    def merged(self) -> "_Leaf":
        """Join neighbouring dimensions that are one run of elements; without those of size 1."""
        dims: list[tuple[int, int]] = []
        for size, stride in self.dims:
            if size == 1:
                continue
            if dims and dims[-1][1] == size * stride:
                dims[-1] = (dims[-1][0] * size, stride)
            else:
                dims.append((size, stride))
        return _Leaf(self.tensor, self.start, tuple(dims))


@dataclass(frozen=True, slots=True)
class _Joined:
    """Tensors of equal shape but for one dimension, along which they follow each other."""

    dim: int
    parts: tuple["Origin", ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        sizes = list(self.parts[0].shape)
        sizes[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return tuple(sizes)

    def permuted(self, order: Sequence[int]) -> "_Joined":
        return _Joined(list(order).index(self.dim), tuple(part.permuted(order) for part in self.parts))

    def narrowed(self, dim: int, start: int, length: int) -> "_Joined":
        if dim != self.dim:
            return _Joined(self.dim, tuple(part.narrowed(dim, start, length) for part in self.parts))
        kept, first = [], 0
        for part in self.parts:
            size = part.shape[dim]
            low, high = max(start, first), min(start + length, first + size)
            if low < high:
                kept.append(part.narrowed(dim, low - first, high - low))
            first += size
        return _Joined(dim, tuple(kept))

    def cut(self, dim: int, outer: int) -> "_Joined":
        if dim != self.dim:
            return _Joined(self.dim + (dim < self.dim), tuple(part.cut(dim, outer) for part in self.parts))
        inner = self.sizes[dim] // outer
        sizes = [part.shape[dim] for part in self.parts]
        if any(size % inner for size in sizes):
            msg = f"parts of {sizes} rows were joined and then cut into {outer} of {inner}"
            raise UntraceableError(msg)
        return _Joined(dim, tuple(part.cut(dim, size // inner) for part, size in zip(self.parts, sizes, strict=True)))

    def merged(self) -> "_Joined":
        return self


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the elements of a tensor come from.

    Attributes:
        core: what they are, with dimensions of its own.
        groups: how many of the core's dimensions, in their order, make up each dimension of the tensor; none of them
            where its size is 1.
    """

    core: _Leaf | _Joined
    groups: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        sizes = self.core.sizes
        ends = list(accumulate(self.groups))
        return tuple(math.prod(sizes[end - count : end]) for end, count in zip(ends, self.groups, strict=True))

    def permuted(self, order: Sequence[int]) -> "Origin":
        """Put the dimensions into another order."""
        ends = list(accumulate(self.groups))
        inner = [dim for group in order for dim in range(ends[group] - self.groups[group], ends[group])]
        return Origin(self.core.permuted(inner), tuple(self.groups[group] for group in order))

    def narrowed(self, dim: int, start: int, length: int) -> "Origin":
        """Keep ``length`` entries of a dimension, from ``start`` on."""
        if length == 0:
            return _zeros((*self.shape[:dim], 0, *self.shape[dim + 1 :]))
        if length == self.shape[dim]:
            return self
        first = sum(self.groups[:dim])
        sizes = self.core.sizes[first : first + self.groups[dim]]
        while sizes[0] == 1:
            first, sizes = first + 1, sizes[1:]
        inner = math.prod(sizes[1:])
        row, offset = divmod(start, inner)
        if not offset and not length % inner:
            return Origin(self.core.narrowed(first, row, length // inner), self.groups)
        if offset + length <= inner:
            return Origin(self.core.narrowed(first, row, 1), self.groups).narrowed(dim, offset, length)
        head = inner - offset if offset else length - length % inner
        return _join(dim, [self.narrowed(dim, start, head), self.narrowed(dim, start + head, length - head)])

    def cut(self, dim: int, outer: int) -> "Origin":
        """Make two dimensions of one, the first of size ``outer``."""
        shape = self.shape
        return self.reshaped((*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :]))

    def reshaped(self, shape: Sequence[int]) -> "Origin":
        """Give the same elements in row-major order another shape."""
        core = self.core.merged()
        if math.prod(shape) == 0:
            return _zeros(shape)
        groups: list[int] = []
        first = 0
        for size in shape:
            dim, missing = first, size
            while missing > 1:
                there = core.sizes[dim]
                if there > missing:
                    if there % missing:
                        msg = f"a dimension of {there} cannot be cut into {missing}"
                        raise UntraceableError(msg)
                    core = core.cut(dim, missing)
                    there = missing
                if missing % there:
                    msg = f"dimensions {core.sizes} cannot be read as {tuple(shape)}"
                    raise UntraceableError(msg)
                missing //= there
                dim += 1
            groups.append(dim - first)
            first = dim
        if groups:
            groups[-1] += len(core.sizes) - first
        else:
            core = _without_dims(core)
        return Origin(core, tuple(groups))

    def content(self) -> Content:
        """Return the elements in row-major order, as what they are read from."""
        if isinstance(self.core, _Leaf):
            leaf = self.core.merged()
            if leaf.tensor is None:
                return (Zeros(math.prod(leaf.sizes)),)
            dims = leaf.dims or ((1, 1),)
            return (Segment(leaf.tensor, leaf.start, *(tuple(column) for column in zip(*dims, strict=True))),)
        parts = [part.content() for part in self.core.parts if math.prod(part.shape)]
        rows = math.prod(self.core.sizes[: self.core.dim])
        if rows == 1 or len(parts) == 1:
            return tuple(node for part in parts for node in part)
        return (Join(rows, tuple(parts)),)


def _without_dims(core: _Leaf | _Joined) -> _Leaf:
    """Return one element as a leaf without dimensions."""
    while isinstance(core, _Joined):
        core = core.parts[0].core
    return _Leaf(core.tensor, core.start, ())


def _join(dim: int, parts: Sequence[Origin]) -> Origin:
    """Put tensors one after the other along a dimension."""
    kept = tuple(part for part in parts if part.shape[dim]) or tuple(parts[:1])
    return kept[0] if len(kept) == 1 else Origin(_Joined(dim, kept), (1,) * len(kept[0].shape))


def _zeros(shape: Sequence[int]) -> Origin:
    return Origin(_Leaf(None, 0, tuple((size, 0) for size in shape)), (1,) * len(shape))


class TracedTensor(torch.Tensor):
    """A tensor without values that knows where its elements come from. It always claims to be contiguous."""

    traced: Origin

    @staticmethod
    def __new__(cls, traced: Origin, dtype: torch.dtype) -> "TracedTensor":  # noqa: ANN001, PYI034 - a Tensor's form
        """Make one of what its elements are."""
        made: TracedTensor = torch.Tensor._make_wrapper_subclass(cls, traced.shape, dtype=dtype)  # noqa: SLF001
        made.traced = traced
        return made

    @classmethod
    def of(cls, spec: TensorSpec) -> "TracedTensor":
        """Return the whole of a source tensor."""
        whole = _Leaf(spec.name, 0, ((spec.numel, 1),))
        return cls(Origin(whole, (1,)).reshaped(spec.shape), TORCH_DTYPES[spec.dtype])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub is no class method
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Record an operation.

        Raises:
            UntraceableError: one that does more than move elements, by name.
        """
        rule = _RULES.get(str(func.overloadpacket).rpartition(".")[2])
        if rule is None:
            msg = f"{func} does more than move elements"
            raise UntraceableError(msg)
        tensors = [thing for thing in _flat(args) if isinstance(thing, TracedTensor)]
        dtype = tensors[0].dtype
        if any(tensor.dtype != dtype for tensor in tensors) or (kwargs or {}).get("dtype", dtype) not in (
            dtype,
            None,
        ):
            msg = f"{func} changes the dtype"
            raise UntraceableError(msg)
        made = rule(*args, **(kwargs or {}))
        return cls(made, dtype) if isinstance(made, Origin) else [cls(origin, dtype) for origin in made]


def _flat(args: Sequence[Any]) -> Iterator[Any]:
    for arg in args:
        yield from arg if isinstance(arg, list | tuple) else (arg,)


def _as_it_is(tensor: TracedTensor, *_: Any, **__: Any) -> Origin:
    return tensor.traced


def _view(tensor: TracedTensor, shape: Sequence[int], **_: Any) -> Origin:
    known = math.prod(size for size in shape if size != -1)
    return tensor.traced.reshaped([tensor.numel() // known if size == -1 else size for size in shape])


def _permute(tensor: TracedTensor, dims: Sequence[int]) -> Origin:
    return tensor.traced.permuted([dim % tensor.dim() for dim in dims])


def _transpose(tensor: TracedTensor, dim0: int = 0, dim1: int = 1) -> Origin:
    order = list(range(tensor.dim()))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return tensor.traced.permuted(order)


def _split(tensor: TracedTensor, sizes: int | Sequence[int], dim: int = 0) -> list[Origin]:
    dim %= tensor.dim()
    total = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)] if total else [0]
    return [
        tensor.traced.narrowed(dim, stop - size, size) for stop, size in zip(accumulate(sizes), sizes, strict=True)
    ]


def _select(tensor: TracedTensor, dim: int, index: int) -> Origin:
    dim %= tensor.dim()
    row = tensor.traced.narrowed(dim, index % tensor.shape[dim], 1)
    return row.reshaped((*row.shape[:dim], *row.shape[dim + 1 :]))


def _unbind(tensor: TracedTensor, dim: int = 0) -> list[Origin]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _slice(
    tensor: TracedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Origin:
    if step != 1:
        msg = f"a slice with step {step}"
        raise UntraceableError(msg)
    dim %= tensor.dim()
    first, stop, _ = slice(start, end).indices(tensor.shape[dim])
    return tensor.traced.narrowed(dim, first, max(stop - first, 0))


def _index(tensor: TracedTensor, indices: Sequence[torch.Tensor | None]) -> Origin:
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or given[0][1].dim() != 1 or given[0][1].dtype == torch.bool:
        msg = "an index that is not one list of integers"
        raise UntraceableError(msg)
    dim, index = given[0]
    size = tensor.shape[dim]
    return _join(dim, [tensor.traced.narrowed(dim, int(row) % size, 1) for row in index.tolist()])


def _squeeze(tensor: TracedTensor, dims: int | Sequence[int] | None = None) -> Origin:
    chosen = range(tensor.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    dropped = {dim % tensor.dim() for dim in chosen if tensor.shape[dim] == 1}
    return tensor.traced.reshaped([size for dim, size in enumerate(tensor.shape) if dim not in dropped])


def _unsqueeze(tensor: TracedTensor, dim: int) -> Origin:
    shape = list(tensor.shape)
    shape.insert(dim % (len(shape) + 1), 1)
    return tensor.traced.reshaped(shape)


def _cat(tensors: Sequence[TracedTensor], dim: int = 0) -> Origin:
    if strangers := [type(tensor).__name__ for tensor in tensors if not isinstance(tensor, TracedTensor)]:
        msg = f"a traced tensor was joined to a {strangers[0]}"
        raise UntraceableError(msg)
    return _join(dim % tensors[0].dim(), [tensor.traced for tensor in tensors])


def _stack(tensors: Sequence[TracedTensor], dim: int = 0) -> Origin:
    return _join(dim % (tensors[0].dim() + 1), [_unsqueeze(tensor, dim) for tensor in tensors])


def _new_zeros(_: TracedTensor, size: Sequence[int], **__: Any) -> Origin:
    return _zeros(size)


_RULES: Mapping[str, Callable[..., Origin | list[Origin]]] = {
    "alias": _as_it_is,
    "cat": _cat,
    "clone": _as_it_is,
    "detach": _as_it_is,
    "index": _index,
    "new_zeros": _new_zeros,
    "permute": _permute,
    "select": _select,
    "slice": _slice,
    "split": _split,
    "split_with_sizes": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "t": _transpose,
    "_to_copy": _as_it_is,
    "transpose": _transpose,
    "unbind": _unbind,
    "unsqueeze": _unsqueeze,
    "_unsafe_view": _view,
    "view": _view,
}
"""What each of torch's operations does to elements, by its name in ``torch.ops.aten``."""
