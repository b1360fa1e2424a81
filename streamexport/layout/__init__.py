"""From a source's catalog to the tensors to write: select, settle ties, cast. One rule a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamexport.catalog import Catalog, Output, Segment
from streamexport.errors import InvalidArgumentError, UnsupportedSourceError
from streamexport.layout.cast import cast
from streamexport.layout.select import select
from streamexport.layout.ties import settle_ties

__all__ = ["Layout", "arrange"]

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Layout:
    """What to write.

    Attributes:
        outputs: the tensors, in the source's order, which decides which shard each goes to.
        tied: for each name that is not written, the name that holds its value.
        warnings: what the user should know.
    """

    outputs: Sequence[Output]
    tied: Mapping[str, str]
    warnings: Sequence[str]


def arrange(
    catalog: Catalog,
    *,
    dtype: object = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
) -> Layout:
    """Lay out a catalog's tensors for writing.

    Args:
        catalog: what the source has.
        dtype: what floating tensors become, as a torch dtype or its name; None keeps each as it is.
        include: glob patterns of the names to write; None is all of them.
        exclude: glob patterns of the names to leave out.

    Raises:
        InvalidArgumentError: an unknown dtype, a pattern that matches nothing, or nothing left to write.
        UnsupportedSourceError: a selected tensor cannot be exported; all such are named.
    """
    names, warnings = select([*catalog.specs, *catalog.problems], include, exclude)
    if problems := [f"{name!r}: {catalog.problems[name]}" for name in names if name in catalog.problems]:
        more = f"\nand {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        msg = "cannot export " + "\n".join(problems[:_SHOWN]) + more
        raise UnsupportedSourceError(msg)
    if not names:
        msg = "there is no tensor to write"
        raise InvalidArgumentError(msg)
    tied, tie_warnings = settle_ties(names, catalog)
    outputs = []
    for name in names:
        if name not in tied:
            spec = catalog.specs[name]
            segment = Segment(catalog.aliases.get(name, name), 0, spec.numel)
            outputs.append(Output(cast(spec, dtype), (segment,)))
    return Layout(outputs, tied, [*warnings, *tie_warnings])
