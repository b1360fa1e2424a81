"""The calls: plan an export, carry it out."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from streamexport.catalog import Source
from streamexport.companions import Companions, check_companions, write_companions
from streamexport.errors import InvalidArgumentError
from streamexport.files import DirectIO, check_direct_io, choose_direct
from streamexport.layout import Choices, Rename, Tied, arrange
from streamexport.memory import MemoryMeter
from streamexport.plan import ExportPlan, Shard, check_variant, make_plan
from streamexport.publish import Staging, check_out_dir, staged
from streamexport.ranks import DEFAULT_PEER_TIMEOUT, check_peer_timeout, open_ranks
from streamexport.report import PROGRESS_HELP, ExportReport, FileReport, Progress, ProgressMeter
from streamexport.sizes import DEFAULT_MAX_SHARD_SIZE, parse_size
from streamexport.sources import Lora, open_source
from streamexport.staging import BUFFERS, Ring, buffer_bytes, open_lane
from streamexport.sweep import sweep


def export_sharded(
    source: object,
    out_dir: str | os.PathLike[str],
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    *,
    dtype: torch.dtype | str | None = None,
    keep_in_fp32: str | Sequence[str] | None = None,
    variant: str | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    trainable_only: bool = False,
    tied: Tied = "drop",
    rename: Rename = None,
    submodule: str | None = None,
    lora: Lora | None = None,
    base: str | os.PathLike[str] | None = None,
    carry_over: bool = False,
    tokenizer: Any = None,
    processor: Any = None,
    strict: bool = False,
    max_host_memory: int | str | None = None,
    direct_io: DirectIO = "auto",
    fsync: bool = True,
    progress: Progress = None,
    peer_timeout: float = DEFAULT_PEER_TIMEOUT,
) -> ExportReport:
    """Write a model's weights as safetensors shards, through a fixed ring of host buffers.

    In a job of several processes (``torch.distributed`` is initialised), every rank must call it with the same
    arguments: rank 0 writes, the others wait without holding a copy of anything, and all return an equal report.
    Weights are read from where they are; nothing of the source is changed.

    Args:
        source: a DeepSpeed engine (ZeRO stage 0, 1 or 2), an ``nn.Module`` in any wrappers, a mapping of names to
            tensors, or the path of a safetensors file, index or directory.
        out_dir: a directory; made when missing. What an earlier export of the same ``variant`` left there stays
            until the new one is complete, then goes.
        max_shard_size: bytes of tensors in one file, as an int or as ``"5GB"`` (decimal) or ``"5GiB"`` (binary).
            A larger tensor has a file of its own.
        dtype: ``None`` keeps what is stored; a torch dtype or its name casts floating tensors, piece by piece, but
            for those that a transformers model declares to be kept in float32.
        keep_in_fp32: glob patterns of more names to write as float32 where ``dtype`` is a 16-bit one.
        variant: as in ``model.fp16.safetensors``.
        include: glob patterns of the tensor names to write, as they are called in the files; ``None`` is all.
        exclude: glob patterns of the tensor names to leave out.
        trainable_only: leave out what needs no gradient.
        tied: ``"drop"`` writes a tied weight once, as ``save_pretrained`` does; ``"duplicate"`` under all its names.
        rename: other names: a mapping of old ones to new ones, or a function. Patterns are matched before.
        submodule: the path of a part of a module, to export as if it were the whole: ``"policy"``.
        lora: what becomes of PEFT adapters. ``"adapter"``, the default where there are any, writes the active one
            as peft does (``adapter_model.safetensors``, ``adapter_config.json``); ``"merge"`` the model with LoRA
            added to its weights, block by block; ``"base"`` the model without.
        base: the directory of the checkpoint that training began with. Its tokenizer and configuration files are
            copied where the source has none, and tensors that it has and the model lacks are reported.
        carry_over: write these, too, from the base's files.
        tokenizer: saved beside the weights by its own ``save_pretrained``.
        processor: the same.
        strict: a file beside the weights that cannot be made is an error, and not only a warning.
        max_host_memory: the ring's budget in bytes, or as a string; ``None`` is 64 MiB.
        direct_io: ``"auto"`` writes past the page cache where the file system can; True and False force it.
        fsync: return only when all is durable.
        progress: ``None`` shows a bar on a terminal, False nothing; a callable receives ``ProgressEvent``.
        peer_timeout: seconds to wait for the slowest rank to call.

    Raises:
        InvalidArgumentError: an argument cannot be used.
        UnsupportedSourceError: the source holds something that cannot be exported right; it is named.
        FormatError: a tensor's name cannot be written, or a source file is malformed.
        OutputError: the output directory cannot take the export.
        CompanionError: with ``strict``, a file beside the weights cannot be made.
        RankError: another rank failed, planned something else, or did not call.
        OSError: writing failed. As with every error: what was in ``out_dir`` before is as it was.
    """
    ranks = open_ranks(peer_timeout)
    plans: list[tuple[Source, ExportPlan, Path]] = []

    def prepare() -> str:
        check_peer_timeout(peer_timeout)
        check_companions(tokenizer, processor)
        directory = _check_arguments(out_dir, direct_io, progress)
        opened, plan = _open_and_plan(
            source,
            Choices(dtype, keep_in_fp32, include, exclude, trainable_only, tied, rename, carry_over),
            submodule=submodule,
            lora=lora,
            base=base,
            max_shard_size=max_shard_size,
            variant=variant,
            max_host_memory=max_host_memory,
        )
        plans.append((opened, plan, directory))
        return f"{plan.digest()} {max_shard_size} {variant} {directory} {base} {lora} {strict}"

    ranks.agree(prepare)
    opened, plan, directory = plans[0]

    needed = plan.elements_of(opened.sharded)

    def write(announce: Callable[[], None]) -> str:
        opened.lead(needed, announce)
        # A directory's config.json is copied as it is unless a cast makes its dtype wrong.
        known = dtype is not None or not isinstance(opened.companion_origin, Path)
        return _write(
            opened,
            plan,
            directory,
            stage=partial(
                _stage_companions,
                Companions(directory, opened.companion_origin, tokenizer, processor, Path(base) if base else None),
                dtype=plan.dtype if known else None,
                untied=bool(plan.untied),
                strict=strict,
                fsync=fsync,
            ),
            direct_io=direct_io,
            fsync=fsync,
            progress=progress,
        ).to_json()

    with closing(opened):
        return ExportReport.from_json(ranks.lead(write, partial(opened.follow, needed)))


def plan_export(
    source: object,
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    *,
    dtype: torch.dtype | str | None = None,
    keep_in_fp32: str | Sequence[str] | None = None,
    variant: str | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    trainable_only: bool = False,
    tied: Tied = "drop",
    rename: Rename = None,
    submodule: str | None = None,
    lora: Lora | None = None,
    base: str | os.PathLike[str] | None = None,
    carry_over: bool = False,
    max_host_memory: int | str | None = None,
) -> ExportPlan:
    """Return what ``export_sharded`` would write, without writing anything or talking to other ranks.

    Arguments and errors are those of ``export_sharded``.
    """
    opened, plan = _open_and_plan(
        source,
        Choices(dtype, keep_in_fp32, include, exclude, trainable_only, tied, rename, carry_over),
        submodule=submodule,
        lora=lora,
        base=base,
        max_shard_size=max_shard_size,
        variant=variant,
        max_host_memory=max_host_memory,
    )
    opened.close()
    return plan


def _check_arguments(out_dir: str | os.PathLike[str], direct_io: object, progress: object) -> Path:
    if not isinstance(out_dir, str | os.PathLike) or not os.fspath(out_dir):
        msg = f"out_dir={out_dir!r}: expected the path of a directory"
        raise InvalidArgumentError(msg)
    check_direct_io(direct_io)
    if progress is not None and progress is not False and not callable(progress):
        msg = f"progress={progress!r}: {PROGRESS_HELP}"
        raise InvalidArgumentError(msg)
    return Path(out_dir)


def _open_and_plan(
    source: object,
    choices: Choices,
    *,
    submodule: str | None,
    lora: Lora | None,
    base: str | os.PathLike[str] | None,
    max_shard_size: int | str,
    variant: str | None,
    max_host_memory: int | str | None,
) -> tuple[Source, ExportPlan]:
    shard_bytes = parse_size(max_shard_size, "max_shard_size")
    host_memory = BUFFERS * buffer_bytes(max_host_memory)
    check_variant(variant)
    if choices.carry_over and base is None:
        msg = "carry_over=True needs base=, the directory of the checkpoint to carry tensors over from"
        raise InvalidArgumentError(msg)
    opened = open_source(source, submodule, lora, base)
    if variant is not None and opened.catalog.weights_name != "model":
        msg = f"variant={variant!r} is not for an adapter, which peft looks for under one name"
        raise InvalidArgumentError(msg)
    layout = arrange(opened.catalog, choices)
    return opened, make_plan(
        layout,
        max_shard_size=shard_bytes,
        variant=variant,
        weights_name=opened.catalog.weights_name,
        host_memory=host_memory,
    )


def _write(
    source: Source,
    plan: ExportPlan,
    out_dir: Path,
    *,
    stage: Callable[[Staging], tuple[list[FileReport], list[str]]],
    direct_io: DirectIO,
    fsync: bool,
    progress: Progress,
) -> ExportReport:
    """Stage all files, make them visible, and tell."""
    check_out_dir(out_dir, plan.needed_disk)
    started = time.perf_counter()
    meter = MemoryMeter()
    with staged(out_dir, fsync=fsync) as staging:
        direct = choose_direct(staging.directory, direct_io)
        # First: a configuration that cannot be saved is known before any weight is read.
        files, failures = stage(staging)
        ring = Ring(lambda: open_lane(source.devices), plan.host_memory // BUFFERS)
        bar = ProgressMeter(progress, sum(shard.nbytes for shard in plan.shards))

        def on_written(shard: Shard, nbytes: int) -> None:
            meter.read()
            bar.add(shard.filename, nbytes)

        with closing(bar):
            swept = sweep(
                plan.shards,
                source,
                ring,
                lambda shard: staging.path(shard.filename),
                direct=direct,
                fsync=fsync,
                on_written=on_written,
            )
        written: Literal["direct", "buffered"] = "direct" if direct else "buffered"
        files += [FileReport(shard.filename, shard.nbytes, len(shard.outputs), written) for shard in plan.shards]
        if plan.index_filename is not None:
            index = plan.index_json()
            staging.write(plan.index_filename, index, fsync=fsync)
            files.append(FileReport(plan.index_filename, len(index), 0, "buffered"))
        durable = staging.publish([file.filename for file in files], plan.variant, plan.weights_name, fsync=fsync)
        meter.read()
    warnings = [*failures, *plan.warnings, *staging.warnings]
    warnings += [
        f"{name!r}: {count} of its values are too large for {plan.dtype_of(name)}, and became inf"
        for name, count in swept.overflows.items()
    ]
    if fsync and not (swept.synced and durable):
        warnings.append("the file system has no fsync: the files are complete, but may not survive a loss of power")
    return ExportReport(
        out_dir=str(out_dir),
        files=tuple(files),
        total_bytes=plan.total_size,
        total_parameters=plan.total_parameters,
        max_shard_size=plan.max_shard_size,
        seconds=time.perf_counter() - started,
        anonymous_bytes=meter.peak,
        pinned_bytes=ring.pinned_bytes,
        tied=dict(plan.tied),
        warnings=tuple(warnings),
    )


def _stage_companions(
    companions: Companions, staging: Staging, *, dtype: str | None, untied: bool, strict: bool, fsync: bool
) -> tuple[list[FileReport], list[str]]:
    scratch = staging.scratch()
    paths, failures = write_companions(companions, scratch, dtype, untied=untied, strict=strict)
    names = {path.relative_to(scratch).as_posix(): path for path in paths}
    return [
        FileReport(name, staging.adopt(path, name, fsync=fsync), 0, "buffered") for name, path in names.items()
    ], failures
