"""A source together with a base checkpoint, whose tensors are read for what the source lacks."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from streamexport.catalog import Catalog, Copy, Segment, Source
from streamexport.sources.safetensors import SafetensorsSource

_MARK = "\0base/"
"""Before the names of the base's tensors: no state dict has it."""


class BasedSource:
    """Reads a source's tensors from it, and a base's from the base.

    Args:
        source: the weights.
        base: the checkpoint that they began with.
    """

    def __init__(self, source: Source, base: SafetensorsSource) -> None:
        self._source = source
        self._base = base
        self.companion_origin = source.companion_origin
        self.sharded = source.sharded
        self.devices: frozenset[torch.device] = source.devices | base.devices
        specs = {_MARK + name: replace(spec, trainable=False) for name, spec in base.catalog.specs.items()}
        self.catalog: Catalog = replace(source.catalog, base=specs)

    def read(self, segment: Segment, start: int, destination: torch.Tensor, copy: Copy) -> None:
        """See ``catalog.Source``."""
        if segment.tensor.startswith(_MARK):
            self._base.read(replace(segment, tensor=segment.tensor.removeprefix(_MARK)), start, destination, copy)
        else:
            self._source.read(segment, start, destination, copy)

    def release(self, tensor: str, numel: int) -> None:
        """See ``catalog.Source``."""
        self._source.release(tensor, numel)

    def lead(self, needed: Mapping[str, int], announce: Callable[[], None]) -> None:
        """See ``catalog.Source``."""
        self._source.lead(needed, announce)

    def follow(self, needed: Mapping[str, int], wait: Callable[[], bool]) -> None:
        """See ``catalog.Source``."""
        self._source.follow(needed, wait)

    def close(self) -> None:
        """Close both."""
        self._base.close()
        self._source.close()
