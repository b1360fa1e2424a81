"""Sources: one file per kind. ``open_source`` picks the right one for what the user gave."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from streamexport.catalog import Source
from streamexport.errors import InvalidArgumentError
from streamexport.sources.module import module_source
from streamexport.sources.safetensors import SafetensorsSource
from streamexport.sources.tensors import mapping_source

__all__ = ["open_source"]


def open_source(source: object) -> Source:
    """Return the source for an engine or module, a mapping of names to tensors, or a safetensors path.

    Raises:
        InvalidArgumentError: it is none of these.
        UnsupportedSourceError: an engine or module that cannot be exported right, by name.
        FormatError: a safetensors file is malformed.
    """
    if isinstance(source, torch.nn.Module):
        return module_source(source)
    if isinstance(source, Mapping):
        return mapping_source(source)
    if isinstance(source, str | os.PathLike):
        return SafetensorsSource(Path(source))
    msg = (
        f"cannot export a {type(source).__name__}: expected a DeepSpeed engine, a torch.nn.Module, "
        "a mapping of names to tensors, or the path of a safetensors file or directory"
    )
    raise InvalidArgumentError(msg)
