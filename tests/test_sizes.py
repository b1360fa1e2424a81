import pytest

from streamexport.errors import InvalidArgumentError
from streamexport.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1, 1),
        (5_000_000_000, 5_000_000_000),
        ("5GB", 5_000_000_000),
        ("5gb", 5_000_000_000),
        ("5GiB", 5 * 1024**3),
        ("5 gib", 5 * 1024**3),
        (" 1.5 MB ", 1_500_000),
        (".5kb", 500),
        ("2.KB", 2000),
        ("0.3TB", 300_000_000_000),
        ("1TiB", 1024**4),
        ("100KiB", 102_400),
    ],
)
def test_sizes_are_read_in_every_accepted_form(text, nbytes):
    """Decimal and binary units, any case, decimals and spaces; exact where floats are not."""
    assert parse_size(text, "max_shard_size") == nbytes


@pytest.mark.parametrize(
    "bad",
    [
        0,
        -1,
        "0GB",
        "-5GB",
        "5",
        "5G",
        "5XB",
        "100B",
        "",
        "GB",
        "1e3MB",
        "0.0001KB",
        5.0,
        None,
        True,
        "5 G B",
        "9" * 5000 + "GB",
    ],
)
def test_other_sizes_are_refused_with_the_accepted_forms(bad):
    """The message shows what was given and what is accepted."""
    with pytest.raises(InvalidArgumentError) as caught:
        parse_size(bad, "max_shard_size")
    for part in ("max_shard_size", repr(bad), "KB, MB, GB, TB", "KiB, MiB, GiB, TiB"):
        assert part in str(caught.value)


def test_sizes_are_shown_in_decimal_units():
    """As max_shard_size's own units."""
    assert [format_size(n) for n in (0, 999, 1000, 1_500_000, 5 * 10**9, 2 * 10**12)] == [
        "0 B",
        "999 B",
        "1.00 KB",
        "1.50 MB",
        "5.00 GB",
        "2.00 TB",
    ]
