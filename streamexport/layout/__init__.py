"""From a source's catalog to the tensors to write: settle ties, select, cast, rename. One rule a file."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from streamexport.catalog import Catalog, Content, Join, Output, Segment, as_they_are, segments_of
from streamexport.errors import InvalidArgumentError, UnsupportedSourceError
from streamexport.layout.base import compare_with_base
from streamexport.layout.cast import Cast
from streamexport.layout.rename import Rename, rename_outputs
from streamexport.layout.select import select
from streamexport.layout.ties import TIED_CHOICES, Tied, settle_ties

__all__ = ["Choices", "Layout", "Rename", "Tied", "arrange"]

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Choices:
    """What the caller wants of a source, as ``export_sharded`` takes it."""

    dtype: object = None
    keep_in_fp32: str | Sequence[str] | None = None
    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] | None = None
    trainable_only: bool = False
    tied: Tied = "drop"
    rename: Rename = None
    carry_over: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """What to write.

    Attributes:
        outputs: the tensors, in the order in which shards are filled.
        tied: for each name that is not written, the name that holds its value.
        dtype: what the first floating parameter is written in, as safetensors names it; None where there is none.
        parameters: elements of all parameters.
        untied: names that the model declares tied and that have come apart.
        warnings: what the user should know.
    """

    outputs: Sequence[Output]
    dtype: str | None
    parameters: int
    tied: Mapping[str, str]
    untied: Sequence[str]
    warnings: Sequence[str]


def arrange(catalog: Catalog, choices: Choices) -> Layout:
    """Lay out a catalog's tensors for writing.

    Raises:
        InvalidArgumentError: a choice that cannot be made of this catalog, or nothing left to write.
        UnsupportedSourceError: a selected tensor cannot be exported; all such are named.
    """
    if choices.tied not in TIED_CHOICES:
        msg = f"tied={choices.tied!r}: expected one of {', '.join(map(repr, TIED_CHOICES))}"
        raise InvalidArgumentError(msg)
    _check_adapter(catalog, choices)
    cast = Cast(choices.dtype, choices.keep_in_fp32)
    offered, ties, untied, warnings = _saved(catalog)
    fixed = _fixed(offered) if choices.trainable_only else set()
    carried, base_warnings = compare_with_base(offered, catalog.base, carry_over=choices.carry_over)
    offered = {**offered, **carried}
    names, select_warnings = select([*offered, *catalog.problems], choices.include, choices.exclude, fixed)
    _refuse_problems(names, catalog.problems)
    if not names:
        msg = "there is no tensor to write" + (": all are left out" if offered else "")
        raise InvalidArgumentError(msg)
    tied = _drop(names, ties) if choices.tied == "drop" else {}
    outputs = {name: cast(offered[name]) for name in names if name not in tied}
    unsaved = 0 if choices.include or choices.exclude or choices.trainable_only else catalog.unsaved_parameters
    renamed = rename_outputs(outputs, choices.rename)
    return Layout(
        list(renamed.values()),
        cast.target or _first_dtype(catalog, outputs.values()),
        _parameters(outputs.values()) + unsaved,
        {name: renamed[kept].spec.name for name, kept in tied.items()},
        untied,
        (*catalog.warnings, *warnings, *base_warnings, *select_warnings, *cast.warnings()),
    )


def _check_adapter(catalog: Catalog, choices: Choices) -> None:
    """Refuse what makes an adapter that peft does not find or does not know."""
    if catalog.weights_name == "model":
        return
    for argument in ("rename", "carry_over"):
        if getattr(choices, argument):
            msg = f"{argument}= is not for an adapter, whose names are peft's: use lora='merge' or lora='base'"
            raise InvalidArgumentError(msg)


def _fixed(offered: Mapping[str, Output]) -> set[str]:
    """Return the names of what is not trained."""
    if unknown := [name for name, output in offered.items() if output.spec.trainable is None]:
        msg = f"trainable_only=True: nothing tells whether {unknown[0]!r} is trained; a module would"
        raise InvalidArgumentError(msg)
    return {name for name, output in offered.items() if not output.spec.trainable}


def _saved(catalog: Catalog) -> tuple[Mapping[str, Output], Mapping[str, str], Sequence[str], Sequence[str]]:
    """Return all tensors as they are saved, the ties among them, what has come apart, and warnings.

    Ties are a matter of the names in memory, selection one of those on disk. So what is kept is converted, as
    ``save_pretrained`` does, and once more with what is dropped, to learn the dropped ones' names.
    """
    settled = settle_ties(list(catalog.specs), catalog)
    specs = list(catalog.specs.values())
    kept = catalog.saved_as([spec for spec in specs if spec.name not in settled.tied])
    outputs = {output.spec.name: output for output in (catalog.saved_as(specs) if settled.tied else kept)}
    outputs |= {output.spec.name: output for output in kept}
    offered = {
        name: replace(output, content=_own(output.content, catalog.aliases)) for name, output in outputs.items()
    }
    holders = {offered[output.spec.name].content: output.spec.name for output in reversed(kept)}
    written = {output.spec.name for output in kept}
    ties = {
        name: holders[output.content]
        for name, output in offered.items()
        if name not in written and output.content in holders
    }
    if catalog.problems and list(outputs.values()) != as_they_are([output.spec for output in outputs.values()]):
        _refuse_problems(list(catalog.problems), catalog.problems)
    return offered, ties, settled.untied, settled.warnings


def _own(content: Content, aliases: Mapping[str, str]) -> Content:
    """Name each tensor in a content by its first name, so that equal contents are equal."""
    if not any(segment.tensor in aliases for segment in segments_of(content)):
        return content
    return tuple(
        Join(node.rows, tuple(_own(part, aliases) for part in node.parts))
        if isinstance(node, Join)
        else replace(node, tensor=aliases.get(node.tensor, node.tensor))
        if isinstance(node, Segment)
        else node
        for node in content
    )


def _drop(names: Sequence[str], ties: Mapping[str, str]) -> dict[str, str]:
    """Return which of the selected names need not be written, because another selected name holds their value."""
    selected = set(names)
    holders: dict[str, str] = {}
    for name in names:
        kept = ties.get(name, name)
        holders.setdefault(kept, kept if kept in selected else name)
    found = {name: holders[ties[name]] for name in names if name in ties}
    return {name: holder for name, holder in found.items() if name != holder}


def _parameters(outputs: Iterable[Output]) -> int:
    """Count the elements of parameters as ``num_parameters()`` does: once, under however many names."""
    segments = {segment for output in outputs if output.spec.parameter for segment in segments_of(output.content)}
    return sum(segment.numel for segment in segments)


def _first_dtype(catalog: Catalog, outputs: Iterable[Output]) -> str | None:
    """Return the dtype that a model's ``dtype`` tells: that of its first floating parameter, in its own order."""
    written = {segment.tensor: output.spec.dtype for output in outputs for segment in segments_of(output.content)}
    candidates = (spec.name for spec in catalog.specs.values() if spec.parameter and spec.floating)
    return next((written[name] for name in candidates if name in written), None)


def _refuse_problems(names: Sequence[str], problems: Mapping[str, str]) -> None:
    if found := [f"{name!r}: {problems[name]}" for name in names if name in problems]:
        more = f"\nand {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        msg = "cannot export " + "\n".join(found[:_SHOWN]) + more
        raise UnsupportedSourceError(msg)
