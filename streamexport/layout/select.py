"""Which names to write, by glob patterns."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from fnmatch import fnmatchcase

from streamexport.errors import InvalidArgumentError


def select(
    names: Sequence[str],
    include: str | Sequence[str] | None,
    exclude: str | Sequence[str] | None,
    fixed: AbstractSet[str] = frozenset(),
) -> tuple[list[str], list[str]]:
    """Return the names that ``include`` matches and ``exclude`` does not, in their order, and warnings.

    Patterns are those of ``fnmatch``, case-sensitive; ``*`` also crosses dots. What is in ``fixed`` is left out too.

    Raises:
        InvalidArgumentError: an ``include`` pattern matches nothing, or a pattern is not a string.
    """
    wanted, unwanted = parse_patterns(include, "include"), parse_patterns(exclude, "exclude")
    for pattern in wanted or ():
        if not _any_match(names, pattern):
            msg = f"include={pattern!r} matches none of the {len(names)} tensors; the first is {_first(names)}"
            raise InvalidArgumentError(msg)
    warnings = [
        f"exclude={pattern!r} matches no tensor" for pattern in unwanted or () if not _any_match(names, pattern)
    ]
    selected = [
        name
        for name in names
        if (wanted is None or any(fnmatchcase(name, pattern) for pattern in wanted))
        and not any(fnmatchcase(name, pattern) for pattern in unwanted or ())
        and name not in fixed
    ]
    return selected, warnings


def parse_patterns(given: str | Sequence[str] | None, argument: str) -> Sequence[str] | None:
    """Return one or several glob patterns as a list.

    Raises:
        InvalidArgumentError: something that is no string.
    """
    if given is None:
        return None
    patterns = [given] if isinstance(given, str) else list(given)
    if any(not isinstance(pattern, str) for pattern in patterns):
        msg = f"{argument} takes a glob pattern or several, not {given!r}"
        raise InvalidArgumentError(msg)
    return patterns


def _any_match(names: Sequence[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _first(names: Sequence[str]) -> str:
    return repr(names[0]) if names else "missing"
