import json
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from oracles import expected_bytes, header

import streamexport
from streamexport import safetensors_format
from streamexport.errors import FormatError
from streamexport.safetensors_format import TORCH_DTYPES, decode_header, encode_header

ALL_DTYPES = list(TORCH_DTYPES.values())


def random_tensor(dtype, shape):
    """Random bytes as a tensor; bool needs bytes that are 0 or 1."""
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def test_every_dtype_the_format_can_name_is_known():
    """All that safetensors 0.8 saves from torch, and the newer kinds among them."""
    from safetensors.torch import _SIZE

    assert set(ALL_DTYPES) == set(_SIZE)
    assert len(ALL_DTYPES) == 20


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_a_file_of_each_dtype_equals_save_file(dtype, tmp_path):
    """Byte for byte, also with a zero-size, a 0-dim (where the format has one) and a strided tensor."""
    tensors = {
        "b": random_tensor(dtype, (3, 8, 4)),
        "a": random_tensor(dtype, (0, 2)),
        "c": random_tensor(dtype, (7,)),
    }
    if dtype != torch.float4_e2m1fn_x2:
        tensors["z"] = random_tensor(dtype, ())
    tensors["t"] = random_tensor(dtype, (6, 4)).t()
    streamexport.export_sharded(tensors, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == expected_bytes(tensors, tmp_path)


NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=0, max_size=12).filter(
    lambda name: name != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 6), max_size=4)


@st.composite
def mappings(draw):
    """Mappings of names to tensors of any dtype, shape and memory order."""
    made = {}
    for name in draw(st.lists(NAMES, min_size=1, max_size=8, unique=True)):
        dtype, shape = draw(st.sampled_from(ALL_DTYPES)), draw(SHAPES)
        if dtype == torch.float4_e2m1fn_x2 and not shape:
            shape = [3]
        tensor = random_tensor(dtype, shape)
        if draw(st.booleans()) and tensor.dim() > 1:
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        if draw(st.booleans()) and tensor.dim():
            tensor = tensor[::2]
        made[name] = tensor
    return made


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=mappings(), direct=st.booleans(), limit=st.integers(1, 2000))
def test_random_mappings_equal_save_file(tensors, direct, limit, tmp_path):
    """Each shard of 500 random mappings is what safetensors writes for its tensors, direct and buffered."""
    out = tmp_path / "out"
    report = streamexport.export_sharded(tensors, out, limit, direct_io=direct)
    written = set()
    for file in report.files:
        if file.tensors:
            names = set(header(out / file.filename)) - {"__metadata__"}
            assert (out / file.filename).read_bytes() == expected_bytes({n: tensors[n] for n in names}, tmp_path)
            written |= names
    assert written == set(tensors)


def test_the_tensor_name_metadata_is_refused(tmp_path):
    """D49: safetensors would write a file that nothing can read."""
    with pytest.raises(FormatError, match="'__metadata__'"):
        streamexport.export_sharded({"__metadata__": torch.zeros(2)}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_not_unicode_is_refused(tmp_path):
    """A lone surrogate cannot be written as UTF-8."""
    with pytest.raises(FormatError, match="not valid unicode"):
        streamexport.export_sharded({"a\ud800": torch.zeros(2)}, tmp_path / "out")


def test_a_zero_dim_float4_is_refused_by_name(tmp_path):
    """The format counts single elements, of which a 0-dim pair has no dimension to hold two."""
    pair = torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(FormatError, match="'scale'"):
        streamexport.export_sharded({"scale": pair}, tmp_path / "out")


@pytest.mark.parametrize("metadata", [{}, {"format": None}, {"step": 3}, {1: "x"}])
def test_metadata_holds_strings_and_is_never_empty(metadata):
    """D49: readers break on an empty __metadata__, and safetensors refuses anything but strings."""
    with pytest.raises(FormatError, match="strings"):
        encode_header([("a", "F32", (2,))], metadata)


def test_a_file_without_tensors_is_never_made():
    """D49: some readers break on one."""
    with pytest.raises(FormatError, match="at least one tensor"):
        encode_header([])


def test_a_header_over_the_limit_of_readers_is_refused(monkeypatch):
    """Before anything is written, with what to do."""
    monkeypatch.setattr(safetensors_format, "MAX_HEADER_BYTES", 100)
    with pytest.raises(FormatError, match="smaller max_shard_size"):
        encode_header([("a" * 100, "F32", (2,))])


def test_decoding_gives_back_what_was_encoded():
    """Names, dtypes, torch shapes and places, float4's too."""
    made = encode_header([("b", "F4", (2, 3)), ("a", "BF16", (5,)), ("c", "BOOL", ())])
    assert decode_header(made.prefix, made.nbytes, "f") == made.extents
    assert json.loads(made.prefix[8:])["b"]["shape"] == [2, 6]


def _broken(edit):
    made = encode_header([("a", "F32", (2,)), ("b", "U8", (3,))])
    entries = json.loads(made.prefix[8:])
    edit(entries)
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + 11


@pytest.mark.parametrize(
    "edit",
    [
        lambda e: e["a"].update(data_offsets=[0, 4]),
        lambda e: e["a"].update(data_offsets=[4, 12]),
        lambda e: e["a"].update(shape=[3]),
        lambda e: e["a"].update(dtype="Q7"),
        lambda e: e["a"].update(shape=[-2]),
        lambda e: e["a"].update(shape="2"),
        lambda e: e["a"].pop("shape"),
        lambda e: e.update(b=[1]),
        lambda e: e["b"].update(data_offsets=[8, 11, 12]),
        lambda e: e["b"].update(dtype="F4", shape=[3], data_offsets=[8, 11]),
    ],
)
def test_headers_whose_offsets_do_not_tile_the_file_are_refused(edit):
    """Holes, overlaps, wrong sizes and odd values, with the file's name."""
    prefix, size = _broken(edit)
    with pytest.raises(FormatError, match="some/file"):
        decode_header(prefix, size, "some/file")
