import json
import os
import stat
from collections.abc import Mapping
from dataclasses import FrozenInstanceError

import pytest
import torch
from oracles import as_bytes, assert_same, expected_bytes, files, header, load, weight_map

import streamexport
from streamexport import InvalidArgumentError, OutputError, UnsupportedSourceError, export_sharded, plan_export


class Lazy(Mapping):
    """Makes its values when they are asked for, each time anew, and keeps none."""

    def __iter__(self):
        return iter("abcdefgh")

    def __len__(self):
        return 8

    def __getitem__(self, name):
        return torch.full((1000,), float(ord(name)))


def test_a_mapping_that_makes_its_values_when_asked_loses_none(tmp_path):
    """A value that is gone leaves its address to the next, which is another tensor all the same."""
    report = export_sharded(Lazy(), tmp_path)
    assert not report.tied
    assert_same(load(tmp_path), dict(Lazy()))


def test_shards_equal_save_file_and_carry_format_pt(tensors, tmp_path):
    """D48: several shards, each byte for byte what safetensors writes with the metadata that loaders ask for."""
    report = export_sharded(tensors, tmp_path / "out", "200KB")
    shards = [file.filename for file in report.files if file.tensors]
    assert len(shards) == 4
    for shard in shards:
        entries = header(tmp_path / "out" / shard)
        assert entries.pop("__metadata__") == {"format": "pt"}
        expected = expected_bytes({name: tensors[name] for name in entries}, tmp_path)
        assert (tmp_path / "out" / shard).read_bytes() == expected
    assert_same(load(tmp_path / "out"), {name: tensor.contiguous() for name, tensor in tensors.items()})


def test_one_shard_has_no_index(tensors, tmp_path):
    """As save_pretrained: model.safetensors alone."""
    export_sharded(tensors, tmp_path / "out")
    assert files(tmp_path / "out") == {"model.safetensors"}


def test_the_index_names_every_tensor_and_its_sizes_are_those_of_the_tensors(tensors, tmp_path):
    """D50, D51: total_size is the bytes written, and every named file is there."""
    export_sharded(tensors, tmp_path / "out", "200KB")
    text = (tmp_path / "out/model.safetensors.index.json").read_text()
    index = json.loads(text)
    assert text == json.dumps(index, indent=2, sort_keys=True) + "\n"
    assert index["metadata"] == {
        "total_size": sum(tensor.nbytes for tensor in tensors.values()),
        "total_parameters": sum(tensor.numel() for tensor in tensors.values()),
    }
    for name, filename in index["weight_map"].items():
        assert name in header(tmp_path / "out" / filename)
    assert set(index["weight_map"].values()) == {f"model-{i:05}-of-00004.safetensors" for i in (1, 2, 3, 4)}


def test_a_tensor_over_the_limit_has_its_own_shard(tmp_path):
    """And its neighbours share theirs, in huggingface_hub's order."""
    tensors = {"a": torch.zeros(10), "big": torch.zeros(100), "b": torch.zeros(10)}
    export_sharded(tensors, tmp_path / "out", 100)
    names = weight_map(tmp_path / "out")
    assert names == {
        "big": "model-00001-of-00002.safetensors",
        "a": "model-00002-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }


def test_a_tensor_over_two_gib_is_whole(tmp_path):
    """A single write is capped near 2 GiB; an expanded tensor of 2.1 GiB takes no memory of that size."""
    row = torch.arange(2**20, dtype=torch.int32)
    big = row.expand(540, 2**20)
    export_sharded({"big": big}, tmp_path / "out", max_host_memory="32MiB")
    path = tmp_path / "out/model.safetensors"
    start = path.stat().st_size - big.nbytes
    assert start == plan_export({"big": big}).shards[0].header.extents["big"].start
    written = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)[start:].view(540, -1)
    expected = as_bytes(row)
    assert all(torch.equal(line, expected) for line in written)
    path.unlink()


@pytest.mark.parametrize("limit", [4096, 70_000, 10**9])
def test_tensors_that_are_not_contiguous_are_written_in_row_major_order(limit, tmp_path):
    """Transposed, strided, expanded, channels-last, negative-bit and conjugated views, in parts of every size."""
    base = torch.randn(37, 23, 11)
    complex_base = torch.randn(30, 40, dtype=torch.complex64)
    views = {
        "transposed": base.permute(2, 0, 1),
        "strided": base[::3, 1::2, ::5],
        "one dimension": torch.randn(100_000)[::7],
        "expanded": torch.randn(50, 1, 3).expand(50, 400, 3),
        "channels last": torch.randn(4, 6, 50, 60).to(memory_format=torch.channels_last),
        "conjugated": complex_base.t().conj(),
        "negated": torch._neg_view(torch.randn(9, 8)),
        "scalar of a view": base[3, 4, 5],
        "wide": torch.randn(3, 70_000).t(),
    }
    export_sharded(views, tmp_path / "out", limit, max_host_memory="256KiB")
    resolved = {name: view.resolve_conj().resolve_neg().contiguous() for name, view in views.items()}
    assert_same(load(tmp_path / "out"), resolved)


def test_disjoint_views_of_one_buffer_are_tensors_of_their_own(tmp_path):
    """D04: the flat buffer of ZeRO-1/2 is not written, only the views, and all of them."""
    flat = torch.randn(100_000)
    views = {f"w{i}": flat[i * 1000 : (i + 1) * 1000].view(10, 100) for i in range(50)}
    report = export_sharded(views, tmp_path / "out", 40_000)
    assert_same(load(tmp_path / "out"), views)
    assert report.total_bytes == 200_000
    written = [tmp_path / "out" / file.filename for file in report.files if file.tensors]
    headers = sum(int.from_bytes(path.read_bytes()[:8], "little") + 8 for path in written)
    assert sum(path.stat().st_size for path in written) - headers == 200_000


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("bfloat16", torch.bfloat16),
        (torch.float16, torch.float16),
        ("torch.float32", torch.float32),
        ("FP32", torch.float32),
    ],
)
def test_a_cast_changes_floating_tensors_alone(given, dtype, tensors, tmp_path):
    """One rounding of each value, as tensor.to() does; integers, bools, complex and 8-bit floats stay."""
    tensors["double"] = torch.randn(300, 200, dtype=torch.float64).t()
    tensors["fp8"] = torch.randn(64).to(torch.float8_e4m3fn)
    tensors["complex"] = torch.randn(8, dtype=torch.complex64)
    export_sharded(tensors, tmp_path / "out", "200KB", dtype=given, max_host_memory="256KiB")
    kept = {"layers.2.count", "mask", "ids", "fp8", "complex"}
    expected = {name: tensor if name in kept else tensor.to(dtype) for name, tensor in tensors.items()}
    assert_same(load(tmp_path / "out"), expected)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", torch.int64, "bfloat", 32, ""])
def test_casts_to_anything_else_are_refused(dtype, tensors, tmp_path):
    """With the accepted names, before anything is made."""
    with pytest.raises(InvalidArgumentError, match="bfloat16"):
        export_sharded(tensors, tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_patterns_select_tensors(tensors, tmp_path):
    """D29: the index is that of what is left."""
    export_sharded(tensors, tmp_path / "out", include=["layers.*", "mask"], exclude="*.bias")
    assert set(load(tmp_path / "out")) == {"layers.0.weight", "layers.10.weight", "layers.2.count", "mask"}


def test_a_pattern_that_matches_nothing_is_not_passed_over(tensors, tmp_path):
    """include: an error; exclude: a warning in the report."""
    with pytest.raises(InvalidArgumentError, match="lyers"):
        export_sharded(tensors, tmp_path / "out", include="lyers.*")
    report = export_sharded(tensors, tmp_path / "out", exclude="lyers.*")
    assert report.warnings == ("exclude='lyers.*' matches no tensor",)
    with pytest.raises(InvalidArgumentError, match="no tensor to write"):
        export_sharded(tensors, tmp_path / "out", exclude="*")


def test_names_of_one_view_are_written_once(tmp_path):
    """D40: a whole-tensor alias in a mapping is recorded, an overlapping view is a tensor of its own."""
    weight = torch.randn(10, 4)
    report = export_sharded({"head": weight, "embed": weight.detach(), "part": weight[:5]}, tmp_path / "out")
    assert report.tied == {"embed": "head"}
    assert_same(load(tmp_path / "out"), {"head": weight, "part": weight[:5]})


def test_the_callers_mapping_stays_full(tensors, tmp_path):
    """save_pretrained empties the dict that it is given."""
    before = dict(tensors)
    export_sharded(tensors, tmp_path / "out")
    assert tensors.keys() == before.keys()
    assert all(tensors[name] is before[name] for name in before)


class Subclass(torch.Tensor):
    pass


def _quantised():
    packed = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    packed.quant_state = object()
    return packed


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(3, device="meta"), "meta device"),
        (torch.zeros(3).as_subclass(Subclass), "Subclass"),
        (torch.zeros(3, dtype=torch.complex128), "complex128"),
        (torch.eye(3).to_sparse(), "sparse"),
        (_quantised(), "quant_state"),
        ({"scale": 1}, "dict"),
        (torch.nn.UninitializedParameter(), "UninitializedParameter"),
    ],
    ids=["meta", "subclass", "complex128", "sparse", "bitsandbytes", "dict", "lazy"],
)
def test_what_cannot_be_written_right_is_refused_by_name(tensor, reason, tmp_path):
    """D45, D46: before anything is created; leaving the tensor out is the user's choice."""
    source = {"fine": torch.zeros(2), "layers.3.odd": tensor}
    with pytest.raises(UnsupportedSourceError, match=f"'layers.3.odd'.*{reason}"):
        export_sharded(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export_sharded(source, tmp_path / "out", exclude="*.odd")
    assert set(load(tmp_path / "out")) == {"fine"}


def test_other_sources_are_refused_with_what_is_accepted(tmp_path):
    """A list, a number, a mapping with keys that are not names, an empty one."""
    for source, message in [([1], "list"), (3, "int"), ({1: torch.zeros(1)}, "names"), ({}, "no tensor")]:
        with pytest.raises(InvalidArgumentError, match=message):
            export_sharded(source, tmp_path / "out")


@pytest.mark.parametrize(
    "options",
    [
        {"max_shard_size": "5 parsecs"},
        {"variant": "../x"},
        {"variant": ""},
        {"direct_io": "maybe"},
        {"progress": "yes"},
        {"max_host_memory": "1KB"},
        {"peer_timeout": 0},
        {"include": [3]},
    ],
    ids=str,
)
def test_unusable_arguments_are_refused_before_anything_is_made(options, tensors, tmp_path):
    """Each names the argument."""
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        export_sharded(tensors, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_too_small_a_budget_is_refused_with_the_smallest_that_works(tensors, tmp_path):
    """And the smallest works."""
    with pytest.raises(InvalidArgumentError, match="smallest that works is 262144 bytes"):
        export_sharded(tensors, tmp_path / "out", max_host_memory=262_143)
    export_sharded(tensors, tmp_path / "out", max_host_memory=262_144)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_an_output_path_that_is_a_file_or_named_like_one_is_refused(name, tensors, tmp_path):
    """D30: the output is a directory."""
    with pytest.raises(InvalidArgumentError, match="directory"):
        export_sharded(tensors, tmp_path / name)
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(InvalidArgumentError, match="is a file"):
            export_sharded(tensors, path)
    assert (tmp_path / "file").read_text() == "x"


def test_too_little_disk_is_found_before_anything_is_made(tmp_path):
    """An expanded tensor that no disk holds."""
    with pytest.raises(OutputError, match="free on the file system"):
        export_sharded({"huge": torch.zeros(1).expand(2**50)}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_honour_the_umask(mask, tensors, tmp_path):
    """safetensors 0.8 leaves 0600."""
    old = os.umask(mask)
    try:
        export_sharded(tensors, tmp_path / "out", "200KB")
    finally:
        os.umask(old)
    for path in (tmp_path / "out").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_variants_have_their_own_files(tensors, tmp_path):
    """Named as Hugging Face names them, and none touches another's."""
    out = tmp_path / "out"
    export_sharded(tensors, out, "200KB")
    plain = {name: (out / name).read_bytes() for name in files(out)}
    export_sharded(tensors, out, "200KB", variant="fp16", dtype="float16")
    assert files(out) - plain.keys() == {
        *(f"model.fp16-{i:05}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.fp16.json",
    }
    export_sharded(tensors, out, variant="fp16")
    assert files(out) - plain.keys() == {"model.fp16.safetensors"}
    assert plain == {name: (out / name).read_bytes() for name in plain}


def test_the_plan_says_what_the_export_will_do(tensors, tmp_path):
    """Files, sizes, disk and memory, without writing; as a table and as JSON."""
    plan = plan_export(tensors, "200KB", variant="x", max_host_memory="3MiB")
    report = export_sharded(tensors, tmp_path / "out", "200KB", variant="x", max_host_memory="3MiB")
    assert [(shard.filename, shard.nbytes) for shard in plan.shards] == [
        (file.filename, file.nbytes) for file in report.files if file.tensors
    ]
    assert plan.needed_disk == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert plan.host_memory == 2 * 1024 * 1024
    assert (plan.total_size, plan.total_parameters) == (report.total_bytes, report.total_parameters)
    table, machine = str(plan), json.loads(plan.to_json())
    for shard in plan.shards:
        assert shard.filename in table
    assert machine["needed_disk"] == plan.needed_disk
    assert {name for shard in machine["shards"] for name in shard["tensors"]} == set(tensors)


def test_the_report_is_for_people_and_machines_and_does_not_change(tensors, tmp_path):
    """D53: also the shard limit is said."""
    report = export_sharded(tensors, tmp_path / "out")
    assert "model.safetensors" in str(report)
    assert "shard limit 5.00 GB" in str(report)
    assert json.loads(report.to_json())["files"][0]["nbytes"] == (tmp_path / "out/model.safetensors").stat().st_size
    assert streamexport.ExportReport.from_json(report.to_json()) == report
    assert report.bytes_per_second == report.total_bytes / report.seconds
    with pytest.raises(FrozenInstanceError):
        report.seconds = 0


def test_progress_is_told_of_every_byte(tensors, tmp_path):
    """Events add up to the files' sizes, on the calling thread, with whole counts."""
    events = []
    report = export_sharded(tensors, tmp_path / "out", "200KB", progress=events.append, max_host_memory="256KiB")
    total = sum(file.nbytes for file in report.files if file.tensors)
    assert [event.bytes_total for event in events] == [total] * len(events)
    done = [event.bytes_done for event in events]
    assert done == sorted(done)
    assert done[-1] == total
    assert {event.filename for event in events} == {file.filename for file in report.files if file.tensors}


def test_an_error_in_the_progress_callable_fails_cleanly(tensors, tmp_path):
    """As any error: no files, no staging directory, no thread."""

    def broken(event):
        msg = "no such bar"
        raise ValueError(msg)

    with pytest.raises(ValueError, match="no such bar"):
        export_sharded(tensors, tmp_path / "out", progress=broken)
    assert not (tmp_path / "out").exists()


def test_a_bar_is_shown_on_a_terminal_only(tensors, tmp_path, monkeypatch, capsys):
    """Nothing in a log file; a byte bar where stderr is a terminal; nothing when it is turned off."""
    import sys

    export_sharded(tensors, tmp_path / "a")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    export_sharded(tensors, tmp_path / "b", progress=False)
    assert capsys.readouterr().err == ""
    export_sharded(tensors, tmp_path / "c")
    assert "export" in capsys.readouterr().err
