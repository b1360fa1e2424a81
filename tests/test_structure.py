import ast
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import streamexport

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "streamexport"

# The rooms from top to bottom: each imports only from those above it.
ROOMS = [
    "errors",
    "_version",
    "sizes",
    "memory",
    "ranks",
    "report",
    "safetensors_format",
    "catalog",
    "tracing",
    "sources",
    "layout",
    "plan",
    "files",
    "staging",
    "overflow",
    "sweep",
    "publish",
    "companions",
    "api",
    "cli",
]
WITHOUT_TORCH = ["errors", "_version", "sizes", "memory", "report", "files", "publish", "companions", "cli"]
EXTRAS = {"deepspeed", "transformers", "accelerate", "safetensors", "numpy"}


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path, *, top_level):
    """Modules that a file imports: at its top level, or anywhere."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def package_files():
    return [
        path
        for path in PACKAGE.rglob("*.py")
        if path.name not in {"__init__.py", "__main__.py"} or path.parent != PACKAGE
    ]


def test_every_file_is_in_a_room_and_rooms_import_from_above_only():
    """Data goes one way, and so do imports."""
    for path in package_files():
        room = room_of(path)
        assert room in ROOMS, path
        for module in imports_of(path, top_level=False):
            if module.startswith("streamexport."):
                other = module.split(".")[1]
                assert ROOMS.index(other) <= ROOMS.index(room), f"{path} imports {module}"
                assert other != room or path.parent != PACKAGE, f"{path} imports itself"


def test_rooms_that_do_not_know_torch_do_not_import_it_at_the_top():
    """The command line's help must not wait for torch."""
    for path in package_files():
        if room_of(path) in WITHOUT_TORCH:
            assert not any(module.split(".")[0] == "torch" for module in imports_of(path, top_level=True)), path


def test_no_room_imports_an_extra():
    """Whoever has an engine has DeepSpeed; what it is like is told by names and attributes."""
    for path in PACKAGE.rglob("*.py"):
        assert not EXTRAS & {module.split(".")[0] for module in imports_of(path, top_level=False)}, path


def test_the_public_names_are_these():
    """A change here is a change for users."""
    assert streamexport.__all__ == sorted(streamexport.__all__)
    assert set(streamexport.__all__) == {
        "CompanionError",
        "ExportPlan",
        "ExportReport",
        "FileReport",
        "FormatError",
        "InvalidArgumentError",
        "OutputError",
        "ProgressEvent",
        "RankError",
        "StreamexportError",
        "UnsupportedSourceError",
        "__version__",
        "export_sharded",
        "plan_export",
    }
    for name in streamexport.__all__:
        assert getattr(streamexport, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = streamexport.nothing
    assert (PACKAGE / "py.typed").exists()


def test_importing_brings_in_no_extra_and_help_no_torch():
    """Import cost: the call needs torch and nothing heavy beside it; the command line's help not even that."""
    script = "import sys; import streamexport.api; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert not {"deepspeed", "transformers", "accelerate", "safetensors", "huggingface_hub", "typer"} & set(loaded)
    script = "import sys; import streamexport.cli as c; c.app(['--help'], standalone_mode=False); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert "streamexport.cli" in loaded
    assert not {"torch", "huggingface_hub", "numpy"} & set(loaded)


def test_the_wheel_installs_into_a_clean_environment_and_brings_the_command(tmp_path):
    """Built from the source tree; its dependencies are those installed here."""
    environment = tmp_path / "env"
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(environment, with_pip=False)
    python = environment / "bin/python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", "--quiet", wheel],
        check=True,
    )
    (site,) = environment.glob("lib/python*/site-packages")
    # Found after the environment's own packages; this is no site directory there, so the editable copy is not seen.
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = environment / "bin/streamexport"
    shown = subprocess.run(
        [command, "--version"], check=True, capture_output=True, text=True, env=clean, cwd=tmp_path
    )
    assert shown.stdout == f"streamexport {streamexport.__version__}\n"
    script = "import streamexport.api, pathlib; print(pathlib.Path(streamexport.__file__).parent)"
    found = subprocess.run(
        [python, "-c", script], check=True, capture_output=True, text=True, env=clean, cwd=tmp_path
    )
    assert Path(found.stdout.strip()) == site / "streamexport"
    assert {path.name for path in (site / "streamexport").iterdir()} >= {"py.typed", "sources", "layout"}


def test_files_are_small():
    """Over 400 lines a file has a second job."""
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")]:
        assert len(path.read_text().splitlines()) <= 400, path
