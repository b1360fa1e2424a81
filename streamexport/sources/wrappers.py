"""What wraps modules, and the names of a state dict without it: found by walking the tree, never by cutting text."""

from collections.abc import Callable, Iterator, Mapping

import torch

from streamexport.errors import UnsupportedSourceError
from streamexport.sources.deepspeed import check_engine, is_engine

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


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return what is inside of all wrappers and engines.

    Raises:
        UnsupportedSourceError: an engine or wrapper that does not hold whole weights.
    """
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


def clean_paths(
    module: torch.nn.Module, kept_part: Callable[[torch.nn.Module], str | None] = lambda _: None
) -> dict[str, str | None]:
    """Return each module's path in the tree, and the same without wrappers' own segments.

    Activation-checkpoint wrappers take their segment off the names of the state dict themselves, whatever is in them:
    each path is also given as it is then.

    Args:
        module: the root.
        kept_part: tells of a module the path of the one part of it that stands for it. All else in it is left out:
            None here.
    """
    return dict(_clean_paths(module, "", "", kept_part))


def _clean_paths(
    module: torch.nn.Module, path: str, clean: str, kept_part: Callable[[torch.nn.Module], str | None]
) -> Iterator[tuple[str, str | None]]:
    yield path, clean
    yield _without_checkpoints(path), clean
    wrapped, kept = _wrapped_attribute(module), kept_part(module)
    # Not named_children(), which leaves out a module's second name; state_dict() does not.
    for child_name, child in module._modules.items():  # noqa: SLF001
        child_path = _joined(path, child_name)
        if kept is not None:
            yield child_path, None
            yield _without_checkpoints(child_path), None
        elif child is not None:
            child_clean = clean if child_name == wrapped else _joined(clean, child_name)
            yield from _clean_paths(child, child_path, child_clean, kept_part)
    if kept is not None:
        yield from _clean_paths(module.get_submodule(kept), _joined(path, kept), clean, kept_part)


def _without_checkpoints(path: str) -> str:
    return ".".join(part for part in path.split(".") if part != _CHECKPOINT_SEGMENT)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def clean_name(name: str, clean: Mapping[str, str | None]) -> str | None:
    """Take wrappers' segments off a state-dict name, by the longest module path it starts with; None if left out.

    The rest stays as it is: a tensor's own name, or what a state-dict hook made of it (activation-checkpoint
    wrappers take off their segment themselves).
    """
    path, rest = name, ""
    while path not in clean:
        path, _, last = path.rpartition(".")
        rest = f"{last}.{rest}" if rest else last
    kept = clean[path]
    return None if kept is None else ".".join(part for part in (kept, rest) if part)
