"""A live ``nn.Module``, inside any nesting of wrappers, or the module of a DeepSpeed engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from streamexport.catalog import Catalog, TensorSpec
from streamexport.errors import InvalidArgumentError, UnsupportedSourceError
from streamexport.sources.deepspeed import check_module
from streamexport.sources.gathering import tensor_source
from streamexport.sources.peft import (
    Lora,
    LowRank,
    MergedSource,
    adapter_source,
    base_model,
    check_unmerged,
    choose_mode,
    kept_part,
    low_rank_updates,
)
from streamexport.sources.tensors import TensorSource, find_problem, spec_of, whole_tensor
from streamexport.sources.transformers import (
    check_parts,
    declared_ties,
    fp32_instead_of,
    is_transformers_model,
    saved_as,
    vocabulary_warnings,
)
from streamexport.sources.wrappers import clean_name, clean_paths, unwrap


def module_source(module: torch.nn.Module, submodule: str | None = None, lora: Lora | None = None) -> TensorSource:
    """Return the source for a module, a wrapped module, or a ZeRO-0/1/2 engine; or for a part of it.

    Names and values are those of ``state_dict()``: parameters, persistent buffers and what state-dict hooks add or
    rename. One parameter under two names is known by its identity, never by its address.

    Args:
        module: the module.
        submodule: the path of the part, without wrappers' segments.
        lora: what becomes of PEFT adapters: ``"adapter"``, ``"merge"`` or ``"base"``; None is the first where there
            are any.

    Raises:
        UnsupportedSourceError: an engine, module or wrapper that cannot be exported right.
        InvalidArgumentError: there is no such part, or no adapter.
    """
    model = unwrap(module)
    check_module(model)
    if submodule is not None:
        model = _part(model, submodule)
    mode = choose_mode(model, lora)
    if mode == "adapter":
        return adapter_source(model)
    if mode is not None:
        model = unwrap(base_model(model))
    if mode == "base":
        check_unmerged(model)
    check_parts(model)
    clean = clean_paths(model, lambda part: kept_part(part, mode) if mode else None)
    state = _read_state(model, clean)
    catalog = Catalog(state.specs, state.aliases, declared_ties(model), state.problems, state.unsaved)
    companion_origin = None
    if is_transformers_model(model):
        specs = {
            name: replace(spec, fp32_instead_of=fp32_instead_of(model, name)) if spec.floating else spec
            for name, spec in state.specs.items()
        }
        catalog = replace(
            catalog, specs=specs, saved_as=partial(saved_as, model), warnings=vocabulary_warnings(model, specs)
        )
        companion_origin = model
    if mode != "merge":
        return tensor_source(state.tensors, catalog, companion_origin)
    added: dict[str, list[LowRank]] = {}
    for path, found in low_rank_updates(model):
        prefix = clean.get(path)
        if prefix is None:
            continue
        name = f"{prefix}.weight" if prefix else "weight"
        if name not in state.tensors:
            msg = f"layer {path!r} has LoRA for a weight {name!r} that is not exported"
            raise UnsupportedSourceError(msg)
        # One weight may be in several layers: tied ones, replicated ones.
        added.setdefault(state.aliases.get(name, name), []).extend(found)
    return MergedSource(state.tensors, catalog, companion_origin, added)


def _part(model: torch.nn.Module, submodule: str) -> torch.nn.Module:
    path = next((path for path, clean in clean_paths(model).items() if clean == submodule and clean), None)
    if path is None:
        children = ", ".join(name for name, _ in model.named_children())
        msg = f"submodule={submodule!r}: {type(model).__name__} has no such part; it has {children or 'none'}"
        raise InvalidArgumentError(msg)
    return unwrap(model.get_submodule(path))


@dataclass(slots=True)
class _State:
    """A module's state dict, as a ``Catalog`` takes it."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    unsaved: int = 0


def _read_state(model: torch.nn.Module, clean: Mapping[str, str | None]) -> _State:
    state = _State()
    parameters = {id(parameter) for parameter in model.parameters()}
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    origin: dict[str, str] = {}
    first: dict[int, str] = {}
    # keep_vars keeps the identity of parameters, which detached copies would lose.
    raw: Mapping[str, Any] = model.state_dict(keep_vars=True)
    for raw_name, value in raw.items():
        name = clean_name(raw_name, clean)
        if name is None:
            continue
        if name in origin:
            msg = f"{origin[name]!r} and {raw_name!r} are both named {name!r} once wrappers are taken off"
            raise UnsupportedSourceError(msg)
        origin[name] = raw_name
        if name in ignored:
            state.unsaved += value.numel() if id(value) in parameters else 0
        elif problem := find_problem(whole := whole_tensor(value)):
            state.problems[name] = problem
        else:
            state.tensors[name] = whole
            state.specs[name] = spec_of(name, whole, parameter=id(value) in parameters)
            kept = first.setdefault(id(value), name)
            if kept != name:
                state.aliases[name] = kept
    return state
