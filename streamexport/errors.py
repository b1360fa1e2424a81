"""Every error this package raises on purpose.

    StreamexportError
    ├── InvalidArgumentError (ValueError)   an argument cannot be used: a size, a dtype, a pattern, a path
    ├── UnsupportedSourceError (TypeError)  the source holds something that cannot be exported right
    ├── FormatError (ValueError)            a safetensors file is malformed, or cannot name what it should hold
    ├── OutputError (OSError)               the output directory or its file system refuses the export
    ├── CompanionError (RuntimeError)       a file beside the weights cannot be made, and the caller is strict
    └── RankError (RuntimeError)            another rank failed, disagrees, or never came

An ``OSError`` of the operating system itself (a full disk, a failing device) is raised as it came, with the
file's name in it.
"""


class StreamexportError(Exception):
    """The root of the tree: catch this to catch all of the above."""


class InvalidArgumentError(StreamexportError, ValueError):
    """An argument cannot be used; the message says which forms are accepted."""


class UnsupportedSourceError(StreamexportError, TypeError):
    """The source holds something that cannot be exported right; the message names it."""


class FormatError(StreamexportError, ValueError):
    """A safetensors file is malformed, or a tensor cannot be named in one."""


class OutputError(StreamexportError, OSError):
    """The output directory, or the file system under it, refuses the export."""


class CompanionError(StreamexportError, RuntimeError):
    """A configuration, tokenizer or processor could not be saved, and the caller is strict."""


class RankError(StreamexportError, RuntimeError):
    """Another rank failed, planned something else, or did not call.

    Attributes:
        rank: the rank that the error came from.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
