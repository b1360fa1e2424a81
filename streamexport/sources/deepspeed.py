"""What is known of DeepSpeed here: which engines keep whole weights on every rank, and which must be refused.

Everything is told by class names and attributes, so that DeepSpeed itself is never imported. The facts are those of
DeepSpeed 0.19.8: under ZeRO-0/1/2 the module's parameters are the whole 16-bit (or fp32) weights, equal on all ranks
after each step, as views of flat buffers. ZeRO-3 leaves placeholders of shape (0,) behind.
"""

from collections.abc import Iterator
from typing import Any

import torch

from streamexport.errors import UnsupportedSourceError


def is_engine(module: torch.nn.Module) -> bool:
    """Return whether it is a DeepSpeed training engine."""
    return "DeepSpeedEngine" in _class_names(module)


def check_engine(engine: Any) -> None:
    """Refuse an engine whose module does not hold the whole weights as they are.

    Raises:
        UnsupportedSourceError: a stage-3, pipeline-parallel, hybrid, ZenFlow or tensor-parallel engine, by name.
    """
    names = _class_names(engine)
    stage = engine.zero_optimization_stage()
    if stage not in (0, 1, 2):
        _refuse(
            f"a ZeRO stage {stage} engine",
            "each rank holds a slice of every weight; stages 0, 1 and 2 can be exported",
        )
    if "PipelineEngine" in names:
        _refuse("a pipeline-parallel engine", "each rank holds the layers of its own stage alone")
    if "DeepSpeedHybridEngine" in names:
        _refuse("a hybrid engine", "it fuses LoRA weights in place while it generates")
    optimizer = getattr(engine, "optimizer", None)
    if any(name.startswith("ZenFlow") for name in _class_names(optimizer)):
        _refuse(
            "a ZenFlow engine", "its live weights lag behind, and DeepSpeed 0.19.8 transposes 2-D weights in memory"
        )
    autotp_size = getattr(engine, "autotp_size", lambda: 0)  # DeepSpeed before 0.16 has none
    degree = max(getattr(engine, "mp_world_size", 1), autotp_size())
    if degree > 1:
        _refuse(f"a tensor-parallel engine (degree {degree})", "each rank holds a slice of some weights")


def check_module(module: torch.nn.Module) -> None:
    """Refuse a module that DeepSpeed has changed so that it does not hold the whole weights.

    Raises:
        UnsupportedSourceError: partitioned, tensor-parallel, expert-parallel or pipeline parameters, by name.
    """
    if "PipelineModule" in _class_names(module):
        _refuse("a PipelineModule", "each rank holds the layers of its own stage alone")
    if "InferenceEngine" in _class_names(module):
        _refuse("a DeepSpeed inference engine", "it rewrites layers into kernels' layouts")
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "ds_id"):
            _refuse(f"parameter {name!r}", "ZeRO stage 3 has partitioned it: this rank holds a slice of it at most")
        if getattr(parameter, "ds_is_replaced_module", False):
            _refuse(f"parameter {name!r}", "AutoTP has cut it: this rank holds a slice of it")
        if getattr(parameter, "ds_optim_param", False):
            _refuse(f"parameter {name!r}", "DeepSpeed's OptimizedLinear shards or quantises it")
    for name, expert_layer in _expert_layers(module):
        _refuse(
            f"layer {name!r} (expert parallelism over {expert_layer.ep_size} ranks)",
            "each rank holds its own experts alone, under local numbers",
        )


def _expert_layers(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, layer in module.named_modules():
        if type(layer).__module__.startswith("deepspeed.moe") and getattr(layer, "ep_size", 1) > 1:
            yield name, layer


def _class_names(thing: object) -> set[str]:
    return {base.__name__ for base in type(thing).__mro__ if base.__module__.partition(".")[0] == "deepspeed"}


def _refuse(what: str, why: str) -> None:
    msg = f"cannot export {what}: {why}"
    raise UnsupportedSourceError(msg)
