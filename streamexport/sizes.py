"""Byte sizes as people write them: ``5GB`` is decimal, ``5GiB`` binary."""

import re

from streamexport.errors import InvalidArgumentError

DEFAULT_MAX_SHARD_SIZE = "5GB"
"""``huggingface_hub``'s default; transformers 5 has 50GB, which most file systems and hubs dislike."""

_FACTORS = {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)} | {
    f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", start=1)
}
_PATTERN = re.compile(r"\s*(\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})\s*([A-Za-z]+)\s*")
_ACCEPTED = (
    "a positive number of bytes as an int, or a string such as '5GB', '1.5 gb', '512MiB' "
    "with one of the units KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)"
)


def parse_size(value: int | str, argument: str) -> int:
    """Return ``value`` in bytes.

    Args:
        value: bytes as an int, or a number with a unit, in any case, with or without decimals and spaces.
        argument: the name of the argument, for the message.

    Raises:
        InvalidArgumentError: ``value`` is zero, negative, less than one byte, or in an unknown form.
    """
    size = -1
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _PATTERN.fullmatch(value)):
        number, unit = match.groups()
        if factor := _FACTORS.get(unit.upper()):
            whole, _, decimals = number.partition(".")
            # Exact, as floats are not: 0.3 TB is 300,000,000,000 bytes.
            size = int((whole + decimals) or "0") * factor // 10 ** len(decimals)
    if size < 1:
        msg = f"{argument}={value!r} is not a size: expected {_ACCEPTED}"
        raise InvalidArgumentError(msg)
    return size


def format_size(nbytes: int) -> str:
    """Return ``nbytes`` for a person to read, in decimal units as ``max_shard_size`` has them."""
    for unit, factor in (("TB", 1000**4), ("GB", 1000**3), ("MB", 1000**2), ("KB", 1000)):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes} B"
