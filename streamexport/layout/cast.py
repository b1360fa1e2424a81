"""The dtype to write: floating tensors are cast, all others stay as they are."""

from dataclasses import replace

import torch

from streamexport.catalog import TensorSpec
from streamexport.errors import InvalidArgumentError

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


def cast(spec: TensorSpec, dtype: object) -> TensorSpec:
    """Return the metadata of a tensor once cast.

    Args:
        spec: the tensor as it is.
        dtype: a torch dtype, its name, or None to keep what is stored.

    Raises:
        InvalidArgumentError: a dtype that weights cannot be cast to.
    """
    if dtype is None:
        return spec
    name = str(dtype).lower().removeprefix("torch.") if isinstance(dtype, str | torch.dtype) else ""
    target = _TARGETS.get(name)
    if target is None:
        msg = f"dtype={dtype!r} is none that weights are cast to: expected one of {', '.join(_TARGETS)}, or None"
        raise InvalidArgumentError(msg)
    return replace(spec, dtype=target) if spec.floating else spec
