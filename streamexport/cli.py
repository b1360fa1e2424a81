"""The command line: a thin layer over ``api``. Torch is imported by the commands, never by ``--help``."""

import importlib
import inspect
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from streamexport._version import __version__
from streamexport.errors import InvalidArgumentError, StreamexportError
from streamexport.sizes import DEFAULT_MAX_SHARD_SIZE

if TYPE_CHECKING:
    from streamexport.files import DirectIO
    from streamexport.layout import Tied as TiedChoice
    from streamexport.sources import Lora as LoraChoice

app = typer.Typer(
    name="streamexport",
    help="Stream model weights to sharded safetensors through a fixed ring of host buffers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_FAILED, _WRONG_USE = 1, 2
_MAX_DIGITS = 30

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A safetensors file, index or directory, or package.module:function, a function without arguments "
        "that returns a DeepSpeed engine, a module or a mapping of names to tensors.",
    ),
]
OutArgument = Annotated[str, typer.Argument(metavar="OUT", help="The directory to write; made when missing.")]
ShardSize = Annotated[
    str, typer.Option(help="Bytes of tensors in one file: 5GB is decimal, 5GiB binary, a bare number bytes.")
]
Dtype = Annotated[str | None, typer.Option(help="Cast floating tensors: float32, bfloat16, float16 or float64.")]
Variant = Annotated[str | None, typer.Option(help="As in model.fp16.safetensors.")]
Include = Annotated[list[str] | None, typer.Option(help="Glob pattern of tensor names to write; may be repeated.")]
Exclude = Annotated[
    list[str] | None, typer.Option(help="Glob pattern of tensor names to leave out; may be repeated.")
]
KeepInFp32 = Annotated[
    list[str] | None, typer.Option(help="Glob pattern of tensor names that a 16-bit --dtype leaves in float32.")
]
TrainableOnly = Annotated[bool, typer.Option("--trainable-only", help="Leave out what needs no gradient.")]
Tied = Annotated[str, typer.Option(help="drop writes a tied weight once, duplicate under all its names.")]
Rename = Annotated[list[str] | None, typer.Option(help="OLD=NEW, another name for a tensor; may be repeated.")]
Submodule = Annotated[str | None, typer.Option(help="The path of a part of the module, to export as the whole.")]
Lora = Annotated[
    str | None,
    typer.Option(help="PEFT adapters: adapter writes the active one, merge adds LoRA to weights, base has none."),
]
Base = Annotated[
    str | None,
    typer.Option(help="The directory of the checkpoint that training began with: gives tokenizer and configuration."),
]
CarryOver = Annotated[
    bool, typer.Option("--carry-over", help="Write the tensors, too, that the base has and the model lacks.")
]
HostMemory = Annotated[str | None, typer.Option(help="Budget of the ring of buffers.  [default: 64MiB]")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show a traceback when something fails.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"streamexport {__version__}")
        raise typer.Exit


@app.command()
def export(
    source: SourceArgument,
    out: OutArgument,
    max_shard_size: ShardSize = DEFAULT_MAX_SHARD_SIZE,
    dtype: Dtype = None,
    keep_in_fp32: KeepInFp32 = None,
    variant: Variant = None,
    include: Include = None,
    exclude: Exclude = None,
    trainable_only: TrainableOnly = False,
    tied: Tied = "drop",
    rename: Rename = None,
    submodule: Submodule = None,
    lora: Lora = None,
    base: Base = None,
    carry_over: CarryOver = False,
    max_host_memory: HostMemory = None,
    direct_io: Annotated[str, typer.Option(help="auto, on or off: write past the page cache.")] = "auto",
    fsync: Annotated[bool, typer.Option(help="Return only when all is durable.")] = True,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail where a file beside the weights cannot be made.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress bar and no report.")] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write SOURCE to OUT as safetensors shards with an index."""
    try:
        from streamexport.api import export_sharded

        direct = _direct_io(direct_io)
        _check(max_shard_size, max_host_memory, variant, out)
        report = export_sharded(
            _resolve(source),
            out,
            _size(max_shard_size),
            dtype=dtype,
            keep_in_fp32=keep_in_fp32 or None,
            variant=variant,
            include=include or None,
            exclude=exclude or None,
            trainable_only=trainable_only,
            tied=_tied(tied),
            rename=_renames(rename),
            submodule=submodule,
            lora=_lora(lora),
            base=base,
            carry_over=carry_over,
            max_host_memory=_size(max_host_memory) if max_host_memory else None,
            direct_io=direct,
            fsync=fsync,
            strict=strict,
            progress=False if quiet else None,
        )
        if _end_ranks() == 0:
            if as_json or not quiet:
                typer.echo(report.to_json() if as_json else str(report))
            elif report.warnings:
                typer.echo("\n".join(f"warning: {warning}" for warning in report.warnings), err=True)
    except Exception as error:  # noqa: BLE001 - whatever it is, the user gets one line and an exit code
        _fail(error, verbose=verbose)


@app.command()
def plan(
    source: SourceArgument,
    max_shard_size: ShardSize = DEFAULT_MAX_SHARD_SIZE,
    dtype: Dtype = None,
    keep_in_fp32: KeepInFp32 = None,
    variant: Variant = None,
    include: Include = None,
    exclude: Exclude = None,
    trainable_only: TrainableOnly = False,
    tied: Tied = "drop",
    rename: Rename = None,
    submodule: Submodule = None,
    lora: Lora = None,
    base: Base = None,
    carry_over: CarryOver = False,
    max_host_memory: HostMemory = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show which files an export of SOURCE would write, and what it needs, without writing."""
    try:
        from streamexport.api import plan_export

        _check(max_shard_size, max_host_memory, variant)
        planned = plan_export(
            _resolve(source),
            _size(max_shard_size),
            dtype=dtype,
            keep_in_fp32=keep_in_fp32 or None,
            variant=variant,
            include=include or None,
            exclude=exclude or None,
            trainable_only=trainable_only,
            tied=_tied(tied),
            rename=_renames(rename),
            submodule=submodule,
            lora=_lora(lora),
            base=base,
            carry_over=carry_over,
            max_host_memory=_size(max_host_memory) if max_host_memory else None,
        )
        if _end_ranks() == 0:
            typer.echo(planned.to_json() if as_json else str(planned))
    except Exception as error:  # noqa: BLE001 - as above
        _fail(error, verbose=verbose)


def main() -> None:
    """Run the command line."""
    app()


def _check(max_shard_size: str, max_host_memory: str | None, variant: str | None, out: str | None = None) -> None:
    """Refuse what is wrong before SOURCE's function spends an hour on a model."""
    from streamexport.plan import check_variant
    from streamexport.publish import check_out_dir
    from streamexport.sizes import parse_size
    from streamexport.staging import buffer_bytes

    parse_size(_size(max_shard_size), "max_shard_size")
    buffer_bytes(_size(max_host_memory) if max_host_memory else None)
    check_variant(variant)
    if out is not None:
        check_out_dir(Path(out), 0)


def _resolve(source: str) -> Any:
    """Return what SOURCE names: a path as it is, or what a function returns."""
    module_name, colon, function_name = source.partition(":")
    if Path(source).exists() or not colon:
        return source
    # As ``python -m`` does, and the installed command does not.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ModuleNotFoundError, AttributeError, ValueError, TypeError) as error:
        if isinstance(error, ModuleNotFoundError) and not f"{module_name}.".startswith(f"{error.name}."):
            raise  # The module is there, and lacks something itself.
        msg = f"{source!r} is neither a path nor package.module:function: {error}"
        raise InvalidArgumentError(msg) from error
    if not callable(function):
        msg = f"{source!r} is a {type(function).__name__}, not a function"
        raise InvalidArgumentError(msg)
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError) as error:
        msg = f"{source} cannot be called without arguments: {error}"
        raise InvalidArgumentError(msg) from error
    try:
        made = function()
    except SystemExit as error:
        msg = f"{source} ended the process (exit code {error.code}) instead of returning a model"
        raise StreamexportError(msg) from error
    if isinstance(made, str | Path):
        msg = f"{source} returned a {type(made).__name__}: expected an engine, a module or a mapping of names"
        raise InvalidArgumentError(msg)
    return made


def _size(text: str) -> int | str:
    # Longer numbers are no sizes, and Python refuses to read them.
    return int(text) if text.strip().isdecimal() and len(text) < _MAX_DIGITS else text


def _direct_io(text: str) -> "DirectIO":
    choices: dict[str, DirectIO] = {"auto": "auto", "on": True, "off": False}
    if text not in choices:
        msg = f"--direct-io {text}: expected auto, on or off"
        raise InvalidArgumentError(msg)
    return choices[text]


def _tied(text: str) -> "TiedChoice":
    choices: dict[str, TiedChoice] = {"drop": "drop", "duplicate": "duplicate"}
    if text not in choices:
        msg = f"--tied {text}: expected drop or duplicate"
        raise InvalidArgumentError(msg)
    return choices[text]


def _lora(text: str | None) -> "LoraChoice | None":
    choices: dict[str, LoraChoice] = {"adapter": "adapter", "merge": "merge", "base": "base"}
    if text is not None and text not in choices:
        msg = f"--lora {text}: expected adapter, merge or base"
        raise InvalidArgumentError(msg)
    return choices[text] if text else None


def _renames(pairs: list[str] | None) -> dict[str, str] | None:
    if unclear := [pair for pair in pairs or () if pair.count("=") != 1]:
        msg = f"--rename {unclear[0]}: expected OLD=NEW"
        raise InvalidArgumentError(msg)
    return {old: new for old, _, new in (pair.partition("=") for pair in pairs)} if pairs else None


def _end_ranks() -> int:
    """Return this process's rank, after leaving a process group that SOURCE's function made."""
    import torch.distributed

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    rank = torch.distributed.get_rank()
    torch.distributed.destroy_process_group()
    return rank


def _fail(error: Exception, *, verbose: bool) -> NoReturn:
    if verbose:
        traceback.print_exception(error)
    else:
        # Our own messages say it all; KeyError's, say, are only a key.
        kind = "" if isinstance(error, StreamexportError) else f"{type(error).__name__}: "
        typer.echo(f"error: {kind}{error}", err=True)
    raise typer.Exit(_WRONG_USE if isinstance(error, InvalidArgumentError) else _FAILED)
