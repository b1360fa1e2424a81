"""The plan: which file each tensor goes to and at which offset, before the first byte moves.

A pure function of the layout, so that every rank computes the same one. Which tensor goes to which file, and what
files are called, is ``huggingface_hub``'s choice, made on sizes alone.
"""

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from streamexport.catalog import Output, segments_of
from streamexport.errors import InvalidArgumentError
from streamexport.layout import Layout
from streamexport.safetensors_format import TORCH_DTYPES, Header, encode_header
from streamexport.sizes import format_size

_VARIANT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Shard:
    """One output file.

    Attributes:
        filename: its name in the output directory.
        header: its first bytes and every tensor's place.
        outputs: its tensors by name, in file order.
    """

    filename: str
    header: Header
    outputs: Mapping[str, Output]

    @property
    def nbytes(self) -> int:
        """The size of the file in bytes."""
        return self.header.nbytes


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Everything about an export that is known beforehand. ``print(plan)`` shows it as a table.

    Attributes:
        shards: the files, in the order of their names.
        max_shard_size: the limit in bytes; a tensor over it has a file of its own.
        total_size: bytes of all tensors.
        total_parameters: elements of all parameters (of all tensors where the source does not tell buffers apart).
        dtype: the torch name of the first floating parameter's dtype as written, for ``config.json``; None
            where there is none.
        host_memory: bytes of host memory that the ring will hold on the writing rank.
        variant: as in ``model.fp16.safetensors``.
        weights_name: what files are called before that, ``model`` or ``adapter_model``.
        tied: for each name that is not written, the name that holds its value.
        untied: names that the model declares tied and that have come apart: ``config.json`` then says untied.
        warnings: what the user should know.
    """

    shards: Sequence[Shard]
    max_shard_size: int
    total_size: int
    total_parameters: int
    dtype: str | None
    host_memory: int
    variant: str | None
    weights_name: str
    tied: Mapping[str, str]
    untied: Sequence[str]
    warnings: Sequence[str]

    @property
    def index_filename(self) -> str | None:
        """The index's name; None where one file holds everything."""
        return index_filename(self.variant, self.weights_name) if len(self.shards) > 1 else None

    def dtype_of(self, name: str) -> str:
        """The torch name of the dtype that a tensor is written in."""
        outputs = next(shard.outputs for shard in self.shards if name in shard.outputs)
        return _torch_name(outputs[name].spec.dtype)

    def elements_of(self, tensors: AbstractSet[str]) -> dict[str, int]:
        """How many elements of some source tensors are read, in the order in which each is first read."""
        elements: dict[str, int] = {}
        for shard in self.shards:
            for output in shard.outputs.values():
                for segment in segments_of(output.content):
                    if segment.tensor in tensors:
                        elements[segment.tensor] = elements.get(segment.tensor, 0) + segment.numel
        return {tensor: numel for tensor, numel in elements.items() if numel}

    @property
    def needed_disk(self) -> int:
        """Bytes of disk the export needs free: an earlier export stays until the new one is in place."""
        return sum(shard.nbytes for shard in self.shards) + len(self.index_json())

    def index_json(self) -> bytes:
        """The index as ``save_pretrained`` formats it; empty where one file holds everything."""
        if self.index_filename is None:
            return b""
        index = {
            "metadata": {"total_parameters": self.total_parameters, "total_size": self.total_size},
            "weight_map": {name: shard.filename for shard in self.shards for name in shard.outputs},
        }
        return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()

    def digest(self) -> str:
        """A hash of every byte's place, equal on ranks that will write the same."""
        digest = hashlib.sha256(f"{self.total_parameters} {self.index_filename}".encode())
        for shard in self.shards:
            digest.update(shard.filename.encode() + shard.header.prefix)
        return digest.hexdigest()

    def __str__(self) -> str:
        """Show the plan as a table."""
        width = max(len(shard.filename) for shard in self.shards)
        rows = [
            f"{shard.filename:<{width}}  {format_size(shard.nbytes):>10}  {len(shard.outputs):>6} tensors"
            for shard in self.shards
        ]
        tensors = sum(len(shard.outputs) for shard in self.shards)
        return "\n".join(
            [
                *rows,
                f"total        {format_size(self.total_size)} in {tensors} tensors",
                f"parameters   {self.total_parameters:,}",
                f"shard limit  {format_size(self.max_shard_size)}",
                f"disk         {format_size(self.needed_disk)} needed",
                f"host memory  {format_size(self.host_memory)} of buffers",
                *(f"tied         {name} -> {kept}" for name, kept in self.tied.items()),
                *(f"warning      {warning}" for warning in self.warnings),
            ]
        )

    def to_json(self) -> str:
        """The plan for machines: shards with their tensors and byte ranges, totals, needs."""
        shards = [
            {
                "filename": shard.filename,
                "nbytes": shard.nbytes,
                "tensors": {
                    name: {"dtype": place.dtype, "shape": place.shape, "start": place.start, "stop": place.stop}
                    for name, place in shard.header.extents.items()
                },
            }
            for shard in self.shards
        ]
        return json.dumps(
            {
                "shards": shards,
                "index": self.index_filename,
                "max_shard_size": self.max_shard_size,
                "total_size": self.total_size,
                "total_parameters": self.total_parameters,
                "dtype": self.dtype,
                "needed_disk": self.needed_disk,
                "host_memory": self.host_memory,
                "variant": self.variant,
                "tied": dict(self.tied),
                "warnings": list(self.warnings),
            },
            indent=2,
        )


def _torch_name(dtype: str) -> str:
    return str(TORCH_DTYPES[dtype]).removeprefix("torch.")


def weights_filename(variant: str | None, weights_name: str) -> str:
    """The name of a one-file export, as transformers' ``_add_variant`` makes it."""
    return f"{weights_name}.{variant}.safetensors" if variant else f"{weights_name}.safetensors"


def index_filename(variant: str | None, weights_name: str) -> str:
    """The name of the index, as transformers' ``_add_variant`` makes it."""
    return f"{weights_name}.safetensors.index.{variant}.json" if variant else f"{weights_name}.safetensors.index.json"


def check_variant(variant: str | None) -> None:
    """Refuse a variant that would not make a plain file name, or one like a shard's number.

    Raises:
        InvalidArgumentError: for such a variant.
    """
    if variant is not None and not (isinstance(variant, str) and _VARIANT.fullmatch(variant)):
        msg = f"variant={variant!r} cannot be part of a file name: expected letters, digits, '_', '-' and '.'"
        raise InvalidArgumentError(msg)


def make_plan(
    layout: Layout, *, max_shard_size: int, variant: str | None, weights_name: str = "model", host_memory: int
) -> ExportPlan:
    """Assign every tensor a file and an offset.

    Args:
        layout: the tensors to write, in the order in which shards are filled.
        max_shard_size: bytes of tensors in one file.
        variant: see ``ExportPlan``.
        weights_name: see ``ExportPlan``.
        host_memory: see ``ExportPlan``.

    Raises:
        FormatError: a name that the format cannot hold, or too long a header.
    """
    # Under 10 ms, but only for those who plan: the command line's help does not need it.
    from huggingface_hub import split_state_dict_into_shards_factory

    outputs = {output.spec.name: output for output in layout.outputs}
    split = split_state_dict_into_shards_factory(
        outputs,
        get_storage_size=lambda output: output.spec.nbytes,
        get_storage_id=lambda _: None,
        filename_pattern=weights_filename(variant, weights_name).replace(".safetensors", "{suffix}.safetensors"),
        # peft reads no more than one file of adapters.
        max_shard_size=max_shard_size if weights_name == "model" else sys.maxsize,
    )
    shards = []
    for filename, names in split.filename_to_tensors.items():
        specs = [outputs[name].spec for name in names]
        header = encode_header((spec.name, spec.dtype, spec.shape) for spec in specs)
        shards.append(Shard(filename, header, {name: outputs[name] for name in header.extents}))
    return ExportPlan(
        shards=shards,
        max_shard_size=max_shard_size,
        total_size=sum(output.spec.nbytes for output in layout.outputs),
        total_parameters=layout.parameters,
        dtype=_torch_name(layout.dtype) if layout.dtype else None,
        host_memory=host_memory,
        variant=variant,
        weights_name=weights_name,
        tied=layout.tied,
        untied=layout.untied,
        warnings=layout.warnings,
    )
