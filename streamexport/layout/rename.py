"""Other names, as the caller wants them."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from streamexport.catalog import Output
from streamexport.errors import InvalidArgumentError

Rename = Mapping[str, str] | Callable[[str], str] | None


def rename_outputs(outputs: Mapping[str, Output], rename: Rename) -> dict[str, Output]:
    """Return the outputs under their new names, by their old ones.

    Args:
        outputs: what is written, by name.
        rename: a mapping of old names to new ones (a name that it lacks stays), or a function of the old name.

    Raises:
        InvalidArgumentError: two tensors of one name, a new name that is no string, or an old one that is not there.
    """
    if rename is None:
        return dict(outputs)
    if isinstance(rename, Mapping):
        if unknown := [old for old in rename if old not in outputs]:
            msg = f"rename names {unknown[0]!r}, which is not among the {len(outputs)} tensors that are written"
            raise InvalidArgumentError(msg)
        names = {old: rename.get(old, old) for old in outputs}
    elif callable(rename):
        names = {old: rename(old) for old in outputs}
    else:
        msg = f"rename={rename!r}: expected a mapping of names to names, or a function of a name"
        raise InvalidArgumentError(msg)
    taken: dict[str, str] = {}
    for old, new in names.items():
        if not isinstance(new, str) or not new:
            msg = f"rename makes {new!r} of {old!r}: expected a name"
            raise InvalidArgumentError(msg)
        if new in taken:
            msg = f"rename gives {taken[new]!r} and {old!r} the same name, {new!r}"
            raise InvalidArgumentError(msg)
        taken[new] = old
    return {old: replace(output, spec=replace(output.spec, name=names[old])) for old, output in outputs.items()}
