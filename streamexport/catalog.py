"""What a source has, and what will be written from it.

A **source** answers two questions: its **catalog** says which tensors there are, from metadata alone; ``read`` copies
a piece of one of them into host memory. Everything between the two works on the facts defined here.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from streamexport.safetensors_format import TORCH_DTYPES, tensor_nbytes

Copy = Callable[[torch.Tensor, torch.Tensor], None]
"""``copy(destination, tensor)``: start copying equal shapes, casting if dtypes differ; may finish later."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor's metadata.

    Attributes:
        name: its name, without any wrapper's part.
        dtype: the safetensors name of its dtype (``"BF16"``).
        shape: torch's shape.
        parameter: whether it counts as a parameter (a buffer does not).
        trainable: whether it is trained; None where the source does not know.
        fp32_instead_of: the dtypes that its model asks to be float32 instead.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parameter: bool = True
    trainable: bool | None = None
    fp32_instead_of: frozenset[str] = frozenset()

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes, of the elements alone: never of the storage they are a view of."""
        return tensor_nbytes(self.dtype, self.shape)

    @property
    def floating(self) -> bool:
        """Whether a cast applies: float64, 32, 16 or bfloat16, but none of the scaled 8- and 4-bit kinds."""
        return TORCH_DTYPES[self.dtype].is_floating_point and TORCH_DTYPES[self.dtype].itemsize > 1


@dataclass(frozen=True, slots=True)
class Segment:
    """A strided view of one source tensor's elements, as they are counted in row-major order.

    Attributes:
        tensor: the source tensor's name.
        start: the view's first element.
        shape: the view's shape.
        strides: elements of the source tensor from one entry of each dimension to the next.
    """

    tensor: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: str, numel: int) -> "Segment":
        """All elements of a tensor, in their order."""
        return cls(tensor, 0, (numel,), (1,))

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Join:
    """Contents side by side, as columns of a table: in each of ``rows`` rows an equal run of each, in their order."""

    rows: int
    parts: tuple["Content", ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return sum(node.numel for part in self.parts for node in part)


@dataclass(frozen=True, slots=True)
class Zeros:
    """Zeros, which transformers pads some tensors with.

    Attributes:
        numel: how many.
    """

    numel: int


Content = tuple[Segment | Zeros | Join, ...]
"""What a tensor's elements in row-major order are: one after the other, what each of these holds."""


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor to write.

    Attributes:
        spec: its metadata.
        content: where its elements come from.
        cast: whether they change their dtype on the way.
    """

    spec: TensorSpec
    content: Content
    cast: bool = False


def segments_of(content: Content) -> Iterator[Segment]:
    """Yield all segments of a content."""
    for node in content:
        if isinstance(node, Segment):
            yield node
        elif isinstance(node, Join):
            for part in node.parts:
                yield from segments_of(part)


def runs_of(content: Content, start: int, numel: int) -> Iterator[tuple[Segment | Zeros, int, int]]:
    """Yield what ``numel`` elements from ``start`` on are made of: a segment or zeros, its first one, how many."""
    for node in content:
        skipped = min(start, node.numel)
        count = min(node.numel - skipped, numel)
        if count and isinstance(node, Join):
            yield from _runs_of_join(node, skipped, count)
        elif count and not isinstance(node, Join):
            yield node, skipped, count
        start -= skipped
        numel -= count


def _runs_of_join(join: Join, start: int, numel: int) -> Iterator[tuple[Segment | Zeros, int, int]]:
    widths = [sum(node.numel for node in part) // join.rows for part in join.parts]
    row, start = divmod(start, sum(widths))
    while numel:
        for part, width in zip(join.parts, widths, strict=True):
            skipped = min(start, width)
            count = min(width - skipped, numel)
            yield from runs_of(part, row * width + skipped, count)
            start -= skipped
            numel -= count
        row += 1


def as_they_are(specs: Sequence[TensorSpec]) -> Sequence[Output]:
    """Return outputs that are whole source tensors under their own names."""
    return [Output(spec, (Segment.whole(spec.name, spec.numel),)) for spec in specs]


@dataclass(frozen=True, slots=True)
class Catalog:
    """All tensors of a source, in its own order.

    Attributes:
        specs: every exportable name, also each name of a tensor that has several.
        aliases: for a name whose tensor has an earlier name in ``specs``, that earlier name.
        declared_ties: for each name that the model declares tied, the name that it takes its value from;
            None where the source declares nothing and identity alone decides.
        problems: for each name that cannot be exported, why.
        unsaved_parameters: elements of parameters that the model has and by its own declaration never saves.
        warnings: what the user should know of the source.
        weights_name: what files are called before their numbers; only ``"model"`` can be cut into several.
        base: tensors of the checkpoint that the source began with, by the names that ``read`` knows them under.
        saved_as: tells how the tensors of some specs are saved: under which names and in which form. As they are,
            where nothing else is known.
    """

    specs: Mapping[str, TensorSpec]
    aliases: Mapping[str, str] = field(default_factory=dict)
    declared_ties: Mapping[str, str] | None = None
    problems: Mapping[str, str] = field(default_factory=dict)
    unsaved_parameters: int = 0
    warnings: Sequence[str] = ()
    weights_name: str = "model"
    base: Mapping[str, TensorSpec] = field(default_factory=dict)
    saved_as: Callable[[Sequence[TensorSpec]], Sequence[Output]] = as_they_are

    def stored_dtype(self, tensor: str) -> str:
        """Return the dtype of a tensor that ``read`` knows."""
        return (self.specs.get(tensor) or self.base[tensor]).dtype


class Source(Protocol):
    """Where weights come from."""

    @property
    def catalog(self) -> Catalog:
        """All tensors, from metadata alone."""

    @property
    def devices(self) -> frozenset[torch.device]:
        """Where they are."""

    @property
    def companion_origin(self) -> object | None:
        """What the files beside the weights are made from: a transformers model, a directory's path, or nothing."""

    def read(self, segment: Segment, start: int, destination: torch.Tensor, copy: Copy) -> None:
        """Fill ``destination`` with elements of a tensor; several threads do so at once.

        Args:
            segment: a view of one tensor.
            start: its first element to copy, in row-major order.
            destination: a 1-D host tensor, of the dtype to write.
            copy: does the copying of what is in memory already.
        """

    @property
    def sharded(self) -> frozenset[str]:
        """Tensors of which each rank holds a shard, so that all ranks must gather them together."""

    def lead(self, needed: Mapping[str, int], announce: Callable[[], None]) -> None:
        """Prepare to read sharded tensors.

        Args:
            needed: how many elements of each will be read, in the order in which they are first read.
            announce: tells the other ranks to join in gathering the next.
        """

    def follow(self, needed: Mapping[str, int], wait: Callable[[], bool]) -> None:
        """Join in gathering, on a rank that does not write.

        Args:
            needed: as in ``lead``.
            wait: waits for the next announcement; returns whether there was one, and not the end.
        """

    def release(self, tensor: str, numel: int) -> None:
        """Know that so many elements of a tensor have arrived where they were read to."""

    def close(self) -> None:
        """Let go of open files."""
