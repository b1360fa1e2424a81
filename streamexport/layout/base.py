"""What the checkpoint that training began with has, and the model has not."""

from collections.abc import Mapping

from streamexport.catalog import Output, Segment, TensorSpec
from streamexport.errors import InvalidArgumentError

_SHOWN = 3


def compare_with_base(
    offered: Mapping[str, Output], base: Mapping[str, TensorSpec], *, carry_over: bool
) -> tuple[dict[str, Output], list[str]]:
    """Return the base's tensors to write beside the model's, and what the user should know.

    Heads for speculative decoding and vision towers are often left out when a model is loaded for training, and
    servers miss them later.

    Args:
        offered: the model's tensors, by the names that they are saved under.
        base: the checkpoint's tensors, by the names that they are read under.
        carry_over: write what the model lacks.

    Raises:
        InvalidArgumentError: nothing of the base is in the model, and it should be carried over.
    """
    lacking = {spec.name: Output(spec, (Segment.whole(key, spec.numel),)) for key, spec in base.items()}
    lacking = {name: output for name, output in lacking.items() if name not in offered}
    if base and len(lacking) == len(base):
        msg = (
            f"the base has no tensor of the model's names (it has {next(iter(lacking))!r}): "
            "is it the checkpoint that this began with?"
        )
        if carry_over:
            raise InvalidArgumentError(msg)
        return {}, [msg]
    warnings = []
    if lacking and not carry_over:
        warnings.append(
            f"the base has {len(lacking)} tensors that the model lacks: {_listed(list(lacking))} "
            "(carry_over=True writes them)"
        )
    changed = [
        f"{spec.name!r} {list(offered[spec.name].spec.shape)} instead of {list(spec.shape)}"
        for spec in base.values()
        if spec.name in offered and offered[spec.name].spec.shape != spec.shape
    ]
    if changed:
        warnings.append("shapes are others than in the base: " + ", ".join(changed[:_SHOWN]))
    return (lacking if carry_over else {}), warnings


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
