import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracles import assert_same, files, load
from safetensors.torch import load_file, save_file

from streamexport import FormatError, InvalidArgumentError, export_sharded


@pytest.fixture
def saved(tensors, tmp_path):
    """An export in four shards."""
    export_sharded(tensors, tmp_path / "in", "200KB")
    return tmp_path / "in"


@pytest.fixture
def plain(tensors):
    """The same tensors, contiguous."""
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def test_a_directory_is_written_again_in_other_shards(saved, plain, tmp_path):
    """And back: the files are the same bytes as before."""
    export_sharded(saved, tmp_path / "one")
    assert files(tmp_path / "one") == {"model.safetensors"}
    assert_same(load(tmp_path / "one"), plain)
    export_sharded(tmp_path / "one/model.safetensors", tmp_path / "many", 4096, max_host_memory="256KiB")
    assert_same(load(tmp_path / "many"), plain)


def test_an_index_and_a_single_file_are_sources_too(saved, plain, tmp_path):
    """Also files that no index joins."""
    export_sharded(str(saved / "model.safetensors.index.json"), tmp_path / "a")
    assert_same(load(tmp_path / "a"), plain)
    (saved / "model.safetensors.index.json").unlink()
    export_sharded(saved, tmp_path / "b")
    assert_same(load(tmp_path / "b"), plain)


def test_a_cast_while_re_sharding_is_that_of_the_tensors(tmp_path):
    """Also of a tensor larger than what is read at once."""
    save_file({"large": torch.randn(700_000, dtype=torch.float64)}, tmp_path / "large.safetensors")
    export_sharded(tmp_path / "large.safetensors", tmp_path / "large", dtype="bfloat16")
    expected = {"large": load_file(tmp_path / "large.safetensors")["large"].bfloat16()}
    assert_same(load(tmp_path / "large"), expected)


def test_a_directory_can_be_written_onto_itself(saved, plain):
    """The source is read to its end before anything of it goes."""
    export_sharded(saved, saved, "700KB")
    assert_same(load(saved), plain)
    assert len(files(saved)) == 3


def test_odd_shard_names_of_the_source_do_not_matter(plain, tmp_path):
    """D52: the output has Hugging Face's own names."""
    source = tmp_path / "in"
    source.mkdir()
    halves = dict(list(plain.items())[:4]), dict(list(plain.items())[4:])
    weight_map = {}
    for number, half in enumerate(halves, start=1):
        name = f"a.safetensors-0000{number}-of-00002.safetensors"
        save_file(half, source / name)
        weight_map |= dict.fromkeys(half, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    export_sharded(source, tmp_path / "out", "300KB")
    assert_same(load(tmp_path / "out"), plain)
    assert all(name.startswith("model") for name in files(tmp_path / "out"))


def test_configuration_and_tokenizer_come_along(saved, tmp_path):
    """A model's directory stays loadable; a cast is written into a copy of its config; other weights do not come."""
    (saved / "config.json").write_text('{"dtype": "float32", "model_type": "llama"}')
    (saved / "tokenizer.json").write_text("{}")
    (saved / "modeling_mine.py").write_text("x = 1")
    (saved / "pytorch_model.bin").write_text("old")
    (saved / "adapter_config.json").write_text("{}")
    (saved / "optimizer.pt").write_text("state")
    (saved / "model.safetensors.index.config.json").write_text("{}")
    export_sharded(saved, tmp_path / "out")
    assert files(tmp_path / "out") == {"config.json", "tokenizer.json", "modeling_mine.py", "model.safetensors"}
    assert (tmp_path / "out/config.json").read_bytes() == (saved / "config.json").read_bytes()
    export_sharded(saved, tmp_path / "out", dtype="bf16")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def test_broken_sources_are_refused_with_the_files_name(saved, tmp_path):
    """Truncated, grown, garbled, incomplete or ambiguous: before anything is written."""
    shard = saved / "model-00002-of-00004.safetensors"
    good = shard.read_bytes()
    index = saved / "model.safetensors.index.json"
    good_index = index.read_text()
    spoiled = [
        (shard, good[:-1], r"model-00002.*describes"),
        (shard, good + b"x", r"model-00002.*describes"),
        (shard, good[:5], r"model-00002.*not a safetensors file"),
        (shard, b"\xff" * 100, r"model-00002.*not a safetensors file"),
        (shard, (20).to_bytes(8, "little") + b"{" * 100, r"model-00002.*not a safetensors header"),
        (index, b"[]", r"index\.json: not a safetensors index"),
        (index, b'{"weight_map": {"a": "../../x.safetensors"}}', "outside its directory"),
        (index, good_index.replace('"mask"', '"musk"').encode(), r"index\.json.*'musk'.*no file holds"),
    ]
    for path, content, message in spoiled:
        before = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(FormatError, match=message):
            export_sharded(saved, tmp_path / "out")
        path.write_bytes(before)
    shard.unlink()
    with pytest.raises(FormatError, match=r"model-00002-of-00004\.safetensors, which is not there"):
        export_sharded(saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ambiguous_and_missing_sources_are_refused(saved, tensors, tmp_path):
    """Two variants' indexes, one tensor in two files, nothing at all."""
    export_sharded(tensors, tmp_path / "two", "200KB", variant="a")
    export_sharded(tensors, tmp_path / "two", "200KB", variant="b")
    with pytest.raises(InvalidArgumentError, match=r"index\.a\.json, .*index\.b\.json"):
        export_sharded(tmp_path / "two", tmp_path / "out")
    (saved / "model.safetensors.index.json").unlink()
    (saved / "copy.safetensors").write_bytes((saved / "model-00001-of-00004.safetensors").read_bytes())
    with pytest.raises(FormatError, match=r"'embed\.weight' is in two files"):
        export_sharded(saved, tmp_path / "out")
    (tmp_path / "none").mkdir()
    with pytest.raises(InvalidArgumentError, match="no safetensors file in"):
        export_sharded(tmp_path / "none", tmp_path / "out")
    with pytest.raises(InvalidArgumentError, match="no such safetensors file"):
        export_sharded(tmp_path / "nowhere", tmp_path / "out")


def test_a_directory_of_many_files_needs_few_descriptors(tmp_path):
    """D61: 128 files in and 128 out, with 64 descriptors."""
    tensors = {f"w{i:03}": torch.full((100,), float(i)) for i in range(128)}
    export_sharded(tensors, tmp_path / "in", 400)
    script = (
        "import resource, sys, streamexport;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64));"
        "streamexport.export_sharded(sys.argv[1], sys.argv[2], 400)"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "in", tmp_path / "out"], check=True)
    assert_same(load(tmp_path / "out"), tensors)
    assert len(files(tmp_path / "out")) == 129


def test_sources_are_read_without_mapping_them(saved, plain, tmp_path, monkeypatch):
    """D57: mmap fails on some network mounts; only positioned reads are used, and short ones are continued."""
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:1000]], at))
    maps = []
    export_sharded(saved, tmp_path / "out", progress=lambda event: maps.append(Path("/proc/self/maps").read_text()))
    assert maps
    assert not any(str(saved) in text for text in maps)
    assert_same(load(tmp_path / "out"), plain)


def test_a_source_that_is_cut_while_it_is_read_is_an_error(saved, tmp_path):
    """Not a file of zeros."""

    def cut(event):
        os.truncate(saved / "model-00004-of-00004.safetensors", 1000)

    with pytest.raises(FormatError, match=r"model-00004.*cut while"):
        export_sharded(saved, tmp_path / "out", 4096, progress=cut, max_host_memory="256KiB")
    assert not (tmp_path / "out").exists()
