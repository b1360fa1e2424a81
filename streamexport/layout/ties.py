"""Tied weights: one tensor under several names is written once, where the model says so."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from streamexport.catalog import Catalog

Tied = Literal["drop", "duplicate"]
TIED_CHOICES: tuple[str, ...] = get_args(Tied)


@dataclass(frozen=True, slots=True)
class SettledTies:
    """What is known of ties.

    Attributes:
        tied: for each name that need not be written, the name that holds its value.
        untied: names that are declared tied, and are tensors of their own.
        warnings: what the user should know of these.
    """

    tied: Mapping[str, str]
    untied: Sequence[str] = ()
    warnings: Sequence[str] = ()


def settle_ties(names: Sequence[str], catalog: Catalog) -> SettledTies:
    """Return which names hold the value of others.

    Where the model declares its ties (transformers' ``all_tied_weights_keys``), a name is dropped only if it is
    declared as the target of a name that has the very same tensor: a model whose config says untied gets both, and
    so does a declared pair that has come apart. Without a declaration the first name is kept.
    """
    declared = catalog.declared_ties
    aliases = catalog.aliases
    if declared is None:
        return SettledTies({name: aliases[name] for name in names if name in aliases})
    known = set(names)
    tied: dict[str, str] = {}
    untied = []
    for target, origin in declared.items():
        if target not in known or origin not in known:
            continue
        if aliases.get(target, target) != aliases.get(origin, origin):
            untied.append(target)
        elif _end(origin, tied) != target:
            tied[target] = origin
    return SettledTies(
        {target: _end(target, tied) for target in tied},
        untied,
        [
            f"{target!r} is declared tied to {declared[target]!r} but is a tensor of its own: both are written, and "
            "config.json says untied"
            for target in untied
        ],
    )


def _end(name: str, tied: Mapping[str, str]) -> str:
    """Follow a chain of ties to the name that is written."""
    while name in tied:
        name = tied[name]
    return name
