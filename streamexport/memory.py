"""How much host memory an export takes: anonymous pages of this process, measured with psutil.

Resident size as a whole is the wrong figure: it also counts pages of mapped files, which the kernel can drop at
will. What gets a process or a container killed is anonymous memory (``RssAnon``) and pinned memory.
"""

import ctypes

import psutil


class MemoryMeter:
    """Remembers the highest growth of anonymous memory since it was made.

    It reads when it is asked to, at the points where memory is highest, and needs no thread of its own.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._base = self.anonymous_bytes()
        self.peak = 0

    def anonymous_bytes(self) -> int:
        """Return the anonymous resident memory of this process in bytes (``RssAnon`` on Linux).

        Where the operating system does not tell shared pages apart, it is the whole resident size.
        """
        info = self._process.memory_info()
        return int(info.rss - getattr(info, "shared", 0))

    def read(self) -> None:
        """Take one reading."""
        self.peak = max(self.peak, self.anonymous_bytes() - self._base)


def view_memory(address: int, nbytes: int) -> memoryview:
    """Return a writable view of host memory; whoever owns it must outlive the view."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
