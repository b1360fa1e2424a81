"""What is known of PEFT here: adapters on their own, base weights without them, and base weights with LoRA added.

peft is looked for among loaded modules and never imported. The facts are those of peft 0.21: a layer with adapters
holds what it replaces as ``base_layer``; ``modules_to_save`` keeps the untouched module as ``original_module``.
"""

import copy
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import torch

from streamexport.catalog import Catalog, Copy, Segment
from streamexport.errors import InvalidArgumentError, UnsupportedSourceError
from streamexport.sources.mapping import mapping_source
from streamexport.sources.pieces import runs_of_segment
from streamexport.sources.tensors import TensorSource, is_dtensor

Lora = Literal["adapter", "merge", "base"]
LORA_CHOICES: tuple[str, ...] = get_args(Lora)

_ROWS = 32
"""Rows of a product that are computed at once, at least: MKL rounds fewer of them otherwise than the whole."""

_BLOCK_ELEMENTS = 128 * 1024
"""Elements that are computed at once, if that is more rows: small change beside the ring."""


def choose_mode(model: torch.nn.Module, lora: str | None) -> Lora | None:
    """Return how a model's adapters are exported; None for a model without.

    Raises:
        InvalidArgumentError: an unknown mode, or one for a model that has no adapters.
    """
    adapted = _peft_model(model) is not None or any(_is_adapted(part) for part in model.modules())
    if lora is None:
        return "adapter" if adapted else None
    for choice in get_args(Lora):
        if lora == choice and adapted:
            chosen: Lora = choice
            return chosen
    if lora in LORA_CHOICES:
        msg = f"lora={lora!r}: {type(model).__name__} has no PEFT adapters"
        raise InvalidArgumentError(msg)
    msg = f"lora={lora!r}: expected one of {', '.join(map(repr, LORA_CHOICES))}, or None"
    raise InvalidArgumentError(msg)


def base_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model that adapters were put into."""
    peft_model = _peft_model(model)
    if peft_model is None:
        return model
    # A mixed model has no such method.
    found: torch.nn.Module = getattr(peft_model, "get_base_model", lambda: peft_model.base_model.model)()
    return found


def adapter_source(model: torch.nn.Module) -> TensorSource:
    """Return the source for the active adapter, with peft's own names and choice of tensors.

    Raises:
        UnsupportedSourceError: none or several adapters are active, or the model is not peft's nor transformers' own.
    """
    peft = sys.modules["peft"]
    adapted: Any = model
    if not isinstance(getattr(model, "peft_config", None), Mapping):
        msg = f"{type(model).__name__} has adapter layers but no peft_config: use lora='merge' or lora='base'"
        raise UnsupportedSourceError(msg)
    layers: list[Any] = [part for part in model.modules() if _is_adapted(part)]
    active = dict.fromkeys(name for layer in layers for name in layer.active_adapters)
    names = list(active) or [adapted.active_adapter]
    if len(names) != 1:
        msg = (
            f"one adapter is exported at a time, and {len(names)} are active ({', '.join(names)}): use set_adapter()"
        )
        raise UnsupportedSourceError(msg)
    state = peft.get_peft_model_state_dict(model, adapter_name=names[0])
    layers_with_it = sum(names[0] in getattr(layer, "lora_A", ()) for layer in layers)
    written = sum(".lora_A." in name for name in state)
    if written < layers_with_it:
        msg = (
            f"peft finds {written} of the {layers_with_it} layers of adapter {names[0]!r}: wrappers in the model "
            "(activation checkpoints, torch.compile) hide the others from it; take them off first"
        )
        raise UnsupportedSourceError(msg)
    if _peft_model(model) is None:
        state = {f"base_model.model.{name}": value for name, value in state.items()}
    source = mapping_source(state)
    # peft writes each under all its names; a file of adapters cannot be split.
    specs = {name: replace(spec, trainable=True) for name, spec in source.catalog.specs.items()}
    source.catalog = replace(source.catalog, specs=specs, declared_ties={}, weights_name="adapter_model")
    source.companion_origin = Adapter(model, names[0])
    return source


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter whose configuration is to be saved.

    Attributes:
        model: the model that it is in.
        name: what it is called there.
    """

    model: Any
    name: str

    def save_pretrained(self, directory: Path) -> None:
        """Write its configuration as peft's ``save_pretrained`` does, and the model card; the live one stays."""
        config = copy.copy(self.model.peft_config[self.name])
        base = base_model(self.model)
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
        config.inference_mode = True
        mapping = None
        if config.task_type is None:
            mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
        if _peft_model(self.model) is not None:
            self.model.create_or_update_model_card(str(directory))
        config.save_pretrained(str(directory), auto_mapping_dict=mapping)


def kept_part(module: torch.nn.Module, mode: Lora) -> str | None:
    """Return the path below a layer with adapters of what stands for it without; None for any other module."""
    if not _is_adapted(module):
        return None
    layer: Any = module
    if hasattr(layer, "modules_to_save"):
        chosen = layer.active_adapters[0] if layer.active_adapters else None
        return (
            f"modules_to_save.{chosen}" if mode == "merge" and chosen in layer.modules_to_save else "original_module"
        )
    # Trainable tokens' wrapper shows the original under that name, but keeps it elsewhere.
    for part in ("token_adapter.base_layer", "original_module"):
        if part.partition(".")[0] in layer._modules:  # noqa: SLF001 - where it is, not what a wrapper shows
            return part
    return "base_layer"


@dataclass(frozen=True, slots=True)
class LowRank:
    """What LoRA adds to a weight: ``scale * b @ a``, of shape (rows, columns).

    Attributes:
        a: of shape (rank, columns).
        b: of shape (rows, rank).
        scale: a factor.
        transposed: the weight is (columns, rows).
        rounded: round it to the weight's dtype before it is added, as peft does for embeddings.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    transposed: bool
    rounded: bool

    def rows(self, start: int, stop: int, scratch: "Scratch") -> torch.Tensor:
        """Return some rows of it, rounded as peft rounds the whole."""
        a, b, dtype = self.a, self.b, self.b.dtype
        # As peft does: processors are slow at 16-bit products.
        if upcast := a.device.type == "cpu" and dtype in (torch.float16, torch.bfloat16):
            a, b = a.float(), b.float()
        a, b = (a[:, start:stop], b) if self.transposed else (a, b[start:stop])
        product = torch.mm(b, a, out=scratch.take((len(b), a.shape[1]), b))
        product *= self.scale
        product = product.t() if self.transposed else product
        return product.to(dtype) if upcast else product


class Scratch:
    """Memory for one tensor at a time, used again and again: malloc would keep a part of each that is freed."""

    def __init__(self) -> None:
        self._bytes: torch.Tensor | None = None

    def take(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Return a tensor without values, with the dtype and device of another; the one before is void."""
        nbytes = math.prod(shape) * like.itemsize
        if self._bytes is None or self._bytes.device != like.device or len(self._bytes) < nbytes:
            self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        return self._bytes[:nbytes].view(like.dtype).view(shape)


def low_rank_updates(model: torch.nn.Module) -> Iterator[tuple[str, list[LowRank]]]:
    """Yield the path of each layer of the base model with active LoRA adapters, and what they add to its weight.

    Raises:
        UnsupportedSourceError: a kind of adapter that is not added here, by the layer's name.
    """
    lora = sys.modules["peft"].tuners.lora.layer
    for path, module in model.named_modules():
        if not _is_adapted(module) or hasattr(module, "modules_to_save"):
            continue
        layer: Any = module
        if type(layer) is lora.Linear:
            sides, transposed = (layer.lora_A, layer.lora_B), layer.fan_in_fan_out
        elif type(layer) is lora.Embedding:
            sides, transposed = (layer.lora_embedding_A, layer.lora_embedding_B), True
        else:
            _refuse(path, f"is a {type(layer).__module__}.{type(layer).__name__}")
        found = []
        for name in layer.active_adapters:
            if name in layer.merged_adapters or name not in sides[0]:
                continue
            if name in layer.lora_variant or layer.lora_bias.get(name):
                _refuse(path, f"has an adapter {name!r} with DoRA, a bias, or another variant of LoRA")
            a, b = (getattr(side[name], "weight", side[name]).detach() for side in sides)
            found.append(LowRank(a, b, layer.scaling[name], transposed, rounded=type(layer) is lora.Embedding))
        if found:
            yield path, found


def check_unmerged(model: torch.nn.Module) -> None:
    """Refuse a base whose weights have adapters in them.

    Raises:
        UnsupportedSourceError: for the first such layer.
    """
    for path, module in model.named_modules():
        if getattr(module, "merged_adapters", None) and _is_adapted(module):
            msg = f"layer {path!r} has adapters merged into its weight: call unmerge_adapter() first"
            raise UnsupportedSourceError(msg)


class MergedSource(TensorSource):
    """A model's tensors, some of them with low-rank updates added while they are read.

    Args:
        source: the base's tensors.
        catalog: their metadata.
        updates: what is added, by the tensors' names.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        catalog: Catalog,
        companion_origin: object | None,
        updates: Mapping[str, Sequence[LowRank]],
    ) -> None:
        super().__init__(tensors, catalog, companion_origin)
        if sharded := [name for name, tensor in self._tensors.items() if is_dtensor(tensor)]:
            msg = f"tensor {sharded[0]!r} is sharded over ranks: LoRA is merged into whole weights alone"
            raise UnsupportedSourceError(msg)
        self._updates = updates
        # One thread computes: each that calls BLAS has a team and buffers of its own, for good.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="streamexport")
        self._sum, self._product = Scratch(), Scratch()

    def read(self, segment: Segment, start: int, destination: torch.Tensor, copy: Copy) -> None:
        """See ``catalog.Source``."""
        if segment.tensor in self._updates:
            self._worker.submit(self._compute, segment, start, destination, copy).result()
        else:
            super().read(segment, start, destination, copy)

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown()

    @torch.no_grad()
    def _compute(self, segment: Segment, start: int, destination: torch.Tensor, copy: Copy) -> None:
        weight, updates = self._tensors[segment.tensor], self._updates[segment.tensor]
        done = 0
        for first, numel in runs_of_segment(segment, start, destination.numel()):
            while numel:
                begin, block = self._block(weight, updates, first // weight.shape[1])
                offset = first - begin * weight.shape[1]
                count = min(numel, block.numel() - offset)
                copy(destination[done : done + count], block.view(-1)[offset : offset + count])
                first, numel, done = first + count, numel - count, done + count  # noqa: PLW2901

    def _block(self, weight: torch.Tensor, updates: Sequence[LowRank], row: int) -> tuple[int, torch.Tensor]:
        """Return the first row of the block that a row is in, and the block with the updates added, on the host."""
        rows, columns = weight.shape
        size = max(_ROWS, _BLOCK_ELEMENTS // columns)
        # What is left at the end goes with the last whole block: no block is smaller than all others.
        last = max(rows // size, 1) - 1
        number = min(row // size, last)
        start, stop = number * size, rows if number == last else (number + 1) * size
        block = self._sum.take((stop - start, columns), weight).copy_(weight[start:stop])
        for update in updates:
            added = update.rows(start, stop, self._product)
            block += added.to(block.dtype) if update.rounded else added
        return start, block.cpu()


def _peft_model(model: object) -> Any:
    peft = sys.modules.get("peft")
    return model if peft is not None and isinstance(model, peft.PeftModel | peft.PeftMixedModel) else None


def _is_adapted(module: object) -> bool:
    names = {f"{base.__module__}.{base.__name__}" for base in type(module).__mro__}
    return bool(names & {"peft.tuners.tuners_utils.BaseTunerLayer", "peft.utils.other.AuxiliaryTrainingWrapper"})


def _refuse(path: str, what: str) -> NoReturn:
    msg = f"layer {path!r} {what}, which is not merged while streaming: call merge_and_unload() first"
    raise UnsupportedSourceError(msg)
