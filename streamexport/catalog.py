"""What a source has, and what will be written from it.

A **source** answers two questions: its **catalog** says which tensors there are, from metadata alone; ``read`` copies
a piece of one of them into host memory. Everything between the two works on the facts defined here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
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
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parameter: bool = True

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
class Catalog:
    """All tensors of a source, in its own order.

    Attributes:
        specs: every exportable name, also each name of a tensor that has several.
        aliases: for a name whose tensor has an earlier name in ``specs``, that earlier name.
        declared_ties: for each name that the model declares tied, the name that it takes its value from;
            None where the source declares nothing and identity alone decides.
        problems: for each name that cannot be exported, why.
    """

    specs: Mapping[str, TensorSpec]
    aliases: Mapping[str, str] = field(default_factory=dict)
    declared_ties: Mapping[str, str] | None = None
    problems: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of elements of one source tensor, in row-major order.

    Attributes:
        tensor: the source tensor's name.
        start: its first element.
        numel: how many.
    """

    tensor: str
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor to write: its metadata, and the segments that its elements are, one after the other."""

    spec: TensorSpec
    segments: tuple[Segment, ...]


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

    def notices(self) -> Sequence[str]:
        """Return what the user should know of the source; it may take a moment, so it is asked beside the writing."""

    def read(self, name: str, start: int, destination: torch.Tensor, copy: Copy) -> None:
        """Fill ``destination`` with elements of a tensor; several threads do so at once.

        Args:
            name: the tensor.
            start: its first element to copy, in row-major order.
            destination: a 1-D host tensor, of the dtype to write.
            copy: does the copying of what is in memory already.
        """

    def close(self) -> None:
        """Let go of open files."""
