"""The dtype to write: floating tensors are cast, all others stay as they are."""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from streamexport.catalog import Output
from streamexport.errors import InvalidArgumentError
from streamexport.layout.select import parse_patterns

# Float8 and float4 are left out: a cast to them without scales would throw the values away.
_TARGETS = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "double": "F64",
    "float": "F32",
    "half": "F16",
    "fp32": "F32",
    "bf16": "BF16",
    "fp16": "F16",
}
_NARROW = ("BF16", "F16")


class Cast:
    """Makes floating tensors another dtype, but for those that must stay in float32.

    Args:
        dtype: a torch dtype, its name, or None to keep what is stored.
        keep_in_fp32: glob patterns of names that become float32 instead.

    Raises:
        InvalidArgumentError: a dtype that weights cannot be cast to, or patterns without a dtype.
    """

    def __init__(self, dtype: object, keep_in_fp32: str | Sequence[str] | None) -> None:
        name = str(dtype).lower().removeprefix("torch.") if isinstance(dtype, str | torch.dtype) else ""
        self.target = _TARGETS.get(name)
        if dtype is not None and self.target is None:
            msg = f"dtype={dtype!r} is none that weights are cast to: expected one of {', '.join(_TARGETS)}, or None"
            raise InvalidArgumentError(msg)
        self._patterns = parse_patterns(keep_in_fp32, "keep_in_fp32") or ()
        if self._patterns and self.target is None:
            msg = f"keep_in_fp32={keep_in_fp32!r} needs a dtype that the other tensors are cast to"
            raise InvalidArgumentError(msg)
        self._met: set[str] = set()

    def __call__(self, output: Output) -> Output:
        """Return the output once cast."""
        spec = output.spec
        met = {pattern for pattern in self._patterns if fnmatchcase(spec.name, pattern)}
        self._met |= met
        target = self.target
        if target is None or not spec.floating or spec.dtype == target:
            return output
        if target in _NARROW and (met or target in spec.fp32_instead_of):
            target = "F32"
        return replace(output, spec=replace(spec, dtype=target), cast=spec.dtype != target)

    def warnings(self) -> list[str]:
        """Say which patterns met no tensor."""
        return [
            f"keep_in_fp32={pattern!r} matches no tensor" for pattern in self._patterns if pattern not in self._met
        ]
