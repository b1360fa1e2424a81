"""What happened: progress while an export runs, and the report it returns."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from streamexport.sizes import format_size

PROGRESS_HELP = "expected None (a bar on a terminal), False (nothing) or a callable"


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """How far an export is; given to a ``progress`` callable after each write.

    Attributes:
        filename: the file that was written to.
        bytes_done: bytes of the whole export that have been written.
        bytes_total: bytes there are to write.
    """

    filename: str
    bytes_done: int
    bytes_total: int


ProgressCallback = Callable[[ProgressEvent], None]
Progress = ProgressCallback | Literal[False] | None


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file that was written.

    Attributes:
        filename: its name in the output directory.
        nbytes: its size.
        tensors: how many tensors it holds; 0 for anything but weights.
        written: ``"direct"`` (past the page cache) or ``"buffered"``.
    """

    filename: str
    nbytes: int
    tensors: int
    written: Literal["direct", "buffered"]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export did. ``print(report)`` reads well, ``to_json()`` is for machines.

    Attributes:
        out_dir: the directory, as it was given.
        files: every file that was written.
        total_bytes: bytes of all tensors.
        total_parameters: elements of all parameters.
        max_shard_size: the limit in bytes.
        seconds: from the first write until the files were visible (and durable, unless ``fsync=False``).
        anonymous_bytes: the highest growth of the writing rank's anonymous memory, in bytes.
        pinned_bytes: pinned host memory that the ring held, in bytes; it may be outside anonymous memory.
        tied: for each name that is not written, the name that holds its value.
        warnings: what the user should know.
    """

    out_dir: str
    files: Sequence[FileReport]
    total_bytes: int
    total_parameters: int
    max_shard_size: int
    seconds: float
    anonymous_bytes: int
    pinned_bytes: int
    tied: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()

    @property
    def bytes_per_second(self) -> float:
        """Bytes of tensors per second."""
        return self.total_bytes / self.seconds

    def to_json(self) -> str:
        """The report as a JSON object, with sizes in bytes."""
        return json.dumps({**asdict(self), "bytes_per_second": self.bytes_per_second}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "ExportReport":
        """Return the report that ``to_json`` wrote."""
        fields: dict[str, Any] = json.loads(text)
        del fields["bytes_per_second"]
        fields["files"] = tuple(FileReport(**file) for file in fields["files"])
        fields["warnings"] = tuple(fields["warnings"])
        return cls(**fields)

    def __str__(self) -> str:
        """Show the report as a table."""
        width = max(len(file.filename) for file in self.files)
        rows = [
            f"  {file.filename:<{width}}  {format_size(file.nbytes):>10}  {file.written}"
            + (f"  {file.tensors} tensors" if file.tensors else "")
            for file in self.files
        ]
        anonymous = format_size(self.anonymous_bytes)
        return "\n".join(
            [
                f"exported {format_size(self.total_bytes)} ({self.total_parameters:,} parameters) to {self.out_dir}",
                *rows,
                f"  shard limit {format_size(self.max_shard_size)}",
                f"  {self.seconds:.2f} s, {format_size(int(self.bytes_per_second))}/s",
                f"  peak extra host memory: {anonymous} anonymous, {format_size(self.pinned_bytes)} pinned",
                *(f"  tied: {name} -> {kept}" for name, kept in self.tied.items()),
                *(f"  warning: {warning}" for warning in self.warnings),
            ]
        )


class ProgressMeter:
    """Adds up what has been written and tells whoever wants to know.

    Args:
        progress: None for a bar on a terminal and nothing elsewhere, False for nothing, or a callable.
        bytes_total: bytes to write.
    """

    def __init__(self, progress: Progress, bytes_total: int) -> None:
        self._total = bytes_total
        self._done = 0
        self._callback = progress if callable(progress) else None
        self._bar: Any = None
        if progress is None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=bytes_total, unit="B", unit_scale=True, desc="export", leave=False)

    def add(self, filename: str, nbytes: int) -> None:
        """Count bytes of a file as written."""
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(nbytes)
        if self._callback is not None:
            self._callback(ProgressEvent(filename, self._done, self._total))

    def close(self) -> None:
        """Take down the bar."""
        if self._bar is not None:
            self._bar.close()
