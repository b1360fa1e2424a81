"""A live ``nn.Module``, inside any nesting of wrappers, or the module of a DeepSpeed engine."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from streamexport.catalog import Catalog, TensorSpec
from streamexport.errors import InvalidArgumentError, UnsupportedSourceError
from streamexport.sources.deepspeed import check_engine, check_module, is_engine
from streamexport.sources.tensors import TensorSource, find_problem, spec_of
from streamexport.sources.transformers import (
    check_parts,
    declared_ties,
    fp32_instead_of,
    is_transformers_model,
    saved_as,
)

_CHECKPOINT_SEGMENT = "_checkpoint_wrapped_module"
# Wrapper classes by qualified name (so that none has to be imported), and the attribute that holds what they wrap.
_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": _CHECKPOINT_SEGMENT,
    "deepspeed.runtime.engine.DeepSpeedEngine": "module",
    "lightning.fabric.wrappers._FabricModule": "_forward_module",
    "lightning_fabric.wrappers._FabricModule": "_forward_module",
}
# Wrappers that hold their parameters in a form of their own.
_SHARDED = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"


def module_source(module: torch.nn.Module, submodule: str | None = None) -> TensorSource:
    """Return the source for a module, a wrapped module, or a ZeRO-0/1/2 engine; or for a part of it.

    Names and values are those of ``state_dict()``: parameters, persistent buffers and what state-dict hooks add or
    rename. One parameter under two names is known by its identity, never by its address.

    Args:
        module: the module.
        submodule: the path of the part, without wrappers' segments.

    Raises:
        UnsupportedSourceError: an engine, module or wrapper that cannot be exported right.
        InvalidArgumentError: there is no such part.
    """
    model = _unwrap(module)
    check_module(model)
    if submodule is not None:
        path = next((path for path, clean in _clean_paths(model, "", "") if clean == submodule), None)
        if path is None:
            children = ", ".join(name for name, _ in model.named_children())
            msg = f"submodule={submodule!r}: {type(model).__name__} has no such part; it has {children or 'none'}"
            raise InvalidArgumentError(msg)
        model = _unwrap(model.get_submodule(path))
    check_parts(model)

    clean = dict(_clean_paths(model, "", ""))
    parameters = {id(parameter) for parameter in model.parameters()}
    # keep_vars keeps the identity of parameters, which detached copies would lose.
    raw: Mapping[str, Any] = model.state_dict(keep_vars=True)
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tensors: dict[str, torch.Tensor] = {}
    origin: dict[str, str] = {}
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    specs: dict[str, TensorSpec] = {}
    problems: dict[str, str] = {}
    unsaved = 0
    for raw_name, value in raw.items():
        name = _clean_name(raw_name, clean)
        if name in origin:
            msg = f"{origin[name]!r} and {raw_name!r} are both named {name!r} once wrappers are taken off"
            raise UnsupportedSourceError(msg)
        origin[name] = raw_name
        if name in ignored:
            unsaved += value.numel() if id(value) in parameters else 0
            continue
        if problem := find_problem(value):
            problems[name] = problem
            continue
        tensors[name] = value
        specs[name] = spec_of(name, value, parameter=id(value) in parameters)
        kept = first.setdefault(id(value), name)
        if kept != name:
            aliases[name] = kept
    catalog = Catalog(specs, aliases, declared_ties(model), problems, unsaved)
    if not is_transformers_model(model):
        return TensorSource(tensors, catalog)
    specs = {
        name: replace(spec, fp32_instead_of=fp32_instead_of(model, name)) if spec.floating else spec
        for name, spec in specs.items()
    }
    catalog = replace(catalog, specs=specs, saved_as=partial(saved_as, model))
    return TensorSource(tensors, catalog, companion_origin=model)


def _unwrap(module: torch.nn.Module) -> torch.nn.Module:
    while attribute := _wrapped_attribute(module):
        if is_engine(module):
            check_engine(module)
        module = getattr(module, attribute)
    return module


def _wrapped_attribute(module: torch.nn.Module) -> str | None:
    for base in type(module).__mro__:
        qualified = f"{base.__module__}.{base.__qualname__}"
        if qualified == _SHARDED:
            msg = "FullyShardedDataParallel keeps flat shards of the weights on each rank: it cannot be exported"
            raise UnsupportedSourceError(msg)
        if attribute := _WRAPPERS.get(qualified):
            return attribute
    return None


def _clean_paths(module: torch.nn.Module, path: str, clean: str) -> Iterator[tuple[str, str]]:
    """Yield each module's path in the tree, and the same without wrappers' own segments.

    Activation-checkpoint wrappers take their segment off the names of the state dict themselves, whatever is in them:
    each path is also given as it is then.
    """
    yield path, clean
    if _CHECKPOINT_SEGMENT in path.split("."):
        yield ".".join(part for part in path.split(".") if part != _CHECKPOINT_SEGMENT), clean
    wrapped = _wrapped_attribute(module)
    # Not named_children(), which leaves out a module's second name; state_dict() does not.
    for child_name, child in module._modules.items():  # noqa: SLF001
        if child is None:
            continue
        child_path = f"{path}.{child_name}" if path else child_name
        child_clean = f"{clean}.{child_name}" if clean else child_name
        yield from _clean_paths(child, child_path, clean if child_name == wrapped else child_clean)


def _clean_name(name: str, clean: Mapping[str, str]) -> str:
    """Take wrappers' segments off a state-dict name, by the longest module path it starts with.

    The rest stays as it is: a tensor's own name, or what a state-dict hook made of it (activation-checkpoint
    wrappers take off their segment themselves).
    """
    path, rest = name, ""
    while path not in clean:
        path, _, last = path.rpartition(".")
        rest = f"{last}.{rest}" if rest else last
    return ".".join(part for part in (clean[path], rest) if part)
