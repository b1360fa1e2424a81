"""Sources: one file per kind. ``open_source`` picks the right one for what the user gave."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from streamexport.catalog import Source
from streamexport.errors import InvalidArgumentError
from streamexport.sources.based import BasedSource
from streamexport.sources.mapping import mapping_source
from streamexport.sources.module import module_source
from streamexport.sources.peft import Lora
from streamexport.sources.safetensors import SafetensorsSource

__all__ = ["Lora", "open_source"]


def open_source(
    source: object,
    submodule: str | None = None,
    lora: Lora | None = None,
    base: str | os.PathLike[str] | None = None,
) -> Source:
    """Return the source for an engine or module, a mapping of names to tensors, or a safetensors path.

    Args:
        source: what the user gave.
        submodule: the path of a part of a module, to take as the whole.
        lora: what becomes of a module's PEFT adapters.
        base: the directory of the checkpoint that the weights began with.

    Raises:
        InvalidArgumentError: it is none of these, or there is no such part or directory.
        UnsupportedSourceError: an engine or module that cannot be exported right, by name.
        FormatError: a safetensors file is malformed.
    """
    opened = _open(source, submodule, lora)
    if base is None:
        return opened
    if not Path(base).is_dir():
        msg = f"base={os.fspath(base)!r}: expected a local model directory"
        raise InvalidArgumentError(msg)
    if opened.catalog.weights_name != "model":
        return opened  # An adapter has nothing in common with the base's weights.
    return BasedSource(opened, SafetensorsSource(Path(base)))


def _open(source: object, submodule: str | None, lora: Lora | None) -> Source:
    if isinstance(source, torch.nn.Module):
        return module_source(source, submodule, lora)
    if lora is not None:
        msg = f"lora={lora!r}: a {type(source).__name__} has no PEFT adapters"
        raise InvalidArgumentError(msg)
    if submodule is not None:
        msg = (
            f"submodule={submodule!r} is a part of a module, not of a {type(source).__name__}: use include and rename"
        )
        raise InvalidArgumentError(msg)
    if isinstance(source, Mapping):
        return mapping_source(source)
    if isinstance(source, str | os.PathLike):
        return SafetensorsSource(Path(source))
    msg = (
        f"cannot export a {type(source).__name__}: expected a DeepSpeed engine, a torch.nn.Module, "
        "a mapping of names to tensors, or the path of a safetensors file or directory"
    )
    raise InvalidArgumentError(msg)
