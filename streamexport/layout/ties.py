"""Tied weights: one tensor under several names is written once, where the model says so."""

from collections.abc import Sequence

from streamexport.catalog import Catalog


def settle_ties(names: Sequence[str], catalog: Catalog) -> tuple[dict[str, str], list[str]]:
    """Return, for each name that need not be written, the name that holds its value; and warnings.

    Where the model declares its ties (transformers' ``all_tied_weights_keys``), a name is dropped only if it is
    declared as the target of a name that has the very same tensor: a model whose config says untied gets both, and
    so does a declared pair that has come apart. Without a declaration the first name is kept.
    """
    selected = set(names)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(catalog.aliases.get(name, name), []).append(name)
    declared = catalog.declared_ties
    tied: dict[str, str] = {}
    if declared is None:
        for kept, *others in groups.values():
            tied.update(dict.fromkeys(others, kept))
        return tied, []
    warnings = []
    for target, origin in declared.items():
        if target not in selected or origin not in selected:
            continue
        if catalog.aliases.get(target, target) == catalog.aliases.get(origin, origin):
            if _end(origin, tied) != target:
                tied[target] = origin
        else:
            warnings.append(f"{target!r} is declared tied to {origin!r} but is a tensor of its own: both are written")
    return {target: _end(target, tied) for target in tied}, warnings


def _end(name: str, tied: dict[str, str]) -> str:
    """Follow a chain of ties to the name that is written."""
    while name in tied:
        name = tied[name]
    return name
