"""Stream a live training engine to sharded safetensors through a fixed ring of host buffers."""

from typing import TYPE_CHECKING, Any

from streamexport._version import __version__
from streamexport.errors import (
    CompanionError,
    FormatError,
    InvalidArgumentError,
    OutputError,
    RankError,
    StreamexportError,
    UnsupportedSourceError,
)

if TYPE_CHECKING:
    from streamexport.api import export_sharded, plan_export
    from streamexport.plan import ExportPlan
    from streamexport.report import ExportReport, FileReport, ProgressEvent

__all__ = [
    "CompanionError",
    "ExportPlan",
    "ExportReport",
    "FileReport",
    "FormatError",
    "InvalidArgumentError",
    "OutputError",
    "ProgressEvent",
    "RankError",
    "StreamexportError",
    "UnsupportedSourceError",
    "__version__",
    "export_sharded",
    "plan_export",
]

# What needs torch is imported when it is asked for, so that `streamexport --help` does not wait for torch.
_LAZY = {
    "export_sharded": "streamexport.api",
    "plan_export": "streamexport.api",
    "ExportPlan": "streamexport.plan",
    "ExportReport": "streamexport.report",
    "FileReport": "streamexport.report",
    "ProgressEvent": "streamexport.report",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
