import json
import subprocess
import sys

import pytest
import torch
from oracles import assert_same, files, load
from typer.testing import CliRunner

from streamexport import __version__, export_sharded
from streamexport.cli import app

USER_CODE = """
import torch

def build_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20))

def build_large():
    return {"w": torch.full((2,), 7e4)}

def build_meta():
    return torch.nn.Linear(2, 2, device="meta")

def build_group():
    torch.distributed.init_process_group("gloo")
    return build_model()

def broken():
    import a_module_that_is_not_there

def leaves():
    raise SystemExit(0)

def path():
    return "out"

def build_for(config):
    return build_model()

def loud():
    raise AssertionError("called")

constant = 3
"""


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Run the command line in a directory with the user's code; return exit code, stdout, stderr."""
    (tmp_path / "usercode.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    runner = CliRunner()

    def run(*args):
        result = runner.invoke(app, [str(arg) for arg in args])
        sys.modules.pop("usercode", None)
        return result.exit_code, result.stdout, result.stderr

    return run


@pytest.fixture
def model(call):
    """What usercode:build_model returns."""
    namespace = {}
    exec(USER_CODE, namespace)  # noqa: S102 - the test's own text
    return namespace["build_model"]()


def test_export_of_a_function_writes_shards_and_prints_the_report(call, model, tmp_path):
    """package.module:function is found in the current directory."""
    code, out, err = call("export", "usercode:build_model", "out", "--max-shard-size", "4KB")
    assert (code, err) == (0, "")
    assert "model-00001-of-00002.safetensors" in out
    assert_same(load(tmp_path / "out"), dict(model.state_dict()))


def test_every_option_reaches_the_export(call, model, tmp_path):
    """The report as JSON for machines."""
    code, out, _ = call(
        *("export", "usercode:build_model", "out", "--max-shard-size", "4 KiB", "--dtype", "bfloat16"),
        *("--variant", "x", "--include", "0.*", "--include", "1.*", "--exclude", "*.bias", "--direct-io", "off"),
        *("--max-host-memory", "1MiB", "--no-fsync", "--json"),
    )
    report = json.loads(out)
    assert code == 0
    assert [file["filename"] for file in report["files"]] == ["model.x.safetensors"]
    assert {file["written"] for file in report["files"]} == {"buffered"}
    assert report["total_bytes"] == 2 * (40 * 30 + 30 * 20)
    assert report["max_shard_size"] == 4096


def test_names_and_ties_can_be_chosen(call, model, tmp_path):
    """--submodule takes a part, --rename gives other names."""
    options = ("--submodule", "1", "--rename", "weight=w", "--rename", "bias=b", "--tied", "duplicate", "--quiet")
    assert call("export", "usercode:build_model", "out", *options)[0] == 0
    assert_same(load(tmp_path / "out"), {"w": model[1].weight, "b": model[1].bias})


def test_a_base_gives_companions_and_missing_tensors(call, model, tmp_path):
    """--base and --carry-over; with --strict a file that cannot be made is a failure."""
    export_sharded({"extra": torch.ones(3), "0.bias": torch.ones(30)}, tmp_path / "base")
    (tmp_path / "base/config.json").write_text("{}")
    options = ("--base", "base", "--carry-over", "--strict", "--quiet")
    assert call("export", "usercode:build_model", "out", *options)[0] == 0
    assert_same(load(tmp_path / "out"), {**model.state_dict(), "extra": torch.ones(3)})
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"dtype": "float32"}
    (tmp_path / "base/config.json").write_text("[")
    code, _, err = call("export", "usercode:build_model", "out", *options)
    assert code == 1
    assert "the dtype in config.json could not be saved" in err


def test_quiet_prints_nothing_but_warnings(call):
    """For scripts, which are not to lose values in silence."""
    assert call("export", "usercode:build_model", "out", "--quiet") == (0, "", "")
    code, out, err = call("export", "usercode:build_large", "out", "--quiet", "--dtype", "float16")
    assert (code, out) == (0, "")
    assert err == "warning: 'w': 2 of its values are too large for float16, and became inf\n"


def test_a_directory_is_re_sharded_and_planned(call, model, tmp_path):
    """plan writes nothing; a bare number is bytes."""
    export_sharded(model, tmp_path / "in")
    code, out, _ = call("plan", "in", "--max-shard-size", "4000")
    assert code == 0
    assert "model-00002-of-00002.safetensors" in out
    assert files(tmp_path / "in") == {"model.safetensors"}
    plan = json.loads(call("plan", "in", "--max-shard-size", "4000", "--json")[1])
    assert len(plan["shards"]) == 2
    assert call("export", "in", "out", "--max-shard-size", "4000", "--quiet")[0] == 0
    assert_same(load(tmp_path / "out"), dict(model.state_dict()))


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["export", "nowhere", "out"], 2, "error: no such safetensors file or directory: nowhere"),
        (["export", "nomodule:f", "out"], 2, "No module named 'nomodule'"),
        (["export", "usercode:nothing", "out"], 2, "has no attribute 'nothing'"),
        (["export", "usercode:constant", "out"], 2, "is a int, not a function"),
        (["export", "usercode:broken", "out"], 1, "a_module_that_is_not_there"),
        (["export", "usercode:build_model", "out", "--max-shard-size", "5 XB"], 2, "KiB, MiB, GiB, TiB"),
        (["export", "usercode:build_model", "out", "--direct-io", "x"], 2, "auto, on or off"),
        (["export", "usercode:build_meta", "out"], 1, "meta device"),
        (["plan", "usercode:build_model", "--dtype", "int3"], 2, "int3"),
        (["plan", "usercode:build_model", "--tied", "x"], 2, "drop or duplicate"),
        (["plan", "usercode:build_model", "--rename", "x"], 2, "OLD=NEW"),
        (["plan", "usercode:build_model", "--lora", "x"], 2, "adapter, merge or base"),
        (["plan", "usercode:build_model", "--lora", "merge"], 2, "has no PEFT adapters"),
        (["plan", "usercode:build_model", "--submodule", "x"], 2, "no such part; it has 0, 1"),
        (["export", "usercode:leaves", "out"], 1, "ended the process (exit code 0)"),
        (["export", "usercode:path", "out"], 2, "returned a str"),
        (["export", "usercode:build_for", "out"], 2, "cannot be called without arguments: missing"),
        (["export", ".:f", "out"], 2, "neither a path nor package.module:function"),
        (["export", "usercode:loud", "out", "--max-shard-size", "banana"], 2, "banana"),
        (["export", "usercode:loud", "out", "--max-shard-size", "9" * 5001], 2, "is not a size"),
        (["export", "usercode:loud", "usercode.py/x"], 2, "is a file, not a directory"),
        (["export", "usercode:loud", "out", "--variant", "a/b"], 2, "variant"),
        (["export", "usercode:loud", "a\0b"], 2, "expected the path of a directory"),
        (["export", "usercode:build_model"], 2, "Missing argument"),
        (["explode"], 2, "No such command"),
    ],
)
def test_errors_are_readable_with_the_right_exit_code(call, args, code, message, tmp_path):
    """2 for wrong use, 1 for a failure; one line and no traceback."""
    found, out, err = call(*args)
    assert (found, out) == (code, "")
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_verbose_shows_the_traceback(call):
    """Only when asked."""
    code, _, err = call("export", "usercode:build_meta", "out", "--verbose")
    assert code == 1
    assert "Traceback" in err
    assert "UnsupportedSourceError" in err


def test_the_version_is_printed(call):
    """And nothing else."""
    assert call("--version") == (0, f"streamexport {__version__}\n", "")


def test_torchrun_exports_on_all_ranks_and_prints_once(call, model, tmp_path):
    """``torchrun -m streamexport``: rank 0 writes and reports; the process group that the function made is left."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "streamexport",
    ]
    done = subprocess.run(
        [*command, "export", "usercode:build_group", "out", "--max-shard-size", "4KB"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("exported ") == 1
    assert "destroy_process_group" not in done.stderr
    assert_same(load(tmp_path / "out"), dict(model.state_dict()))
