"""The files beside the weights that make a directory loadable: configuration, custom code, tokenizer, processor.

Each kind is written on its own, and one that fails costs no weights: it becomes a warning, or an error before any
weight is read where the caller is strict.
"""

import copy
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from streamexport.errors import CompanionError, InvalidArgumentError

# What a model directory holds beside weights, their indexes and training state.
_TOKENIZER_PATTERNS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)
_OTHER_PATTERNS = ("*config*.json", "*.py")


@dataclass(frozen=True, slots=True)
class Companions:
    """Where the files beside the weights come from.

    Attributes:
        origin: what weights come from: a transformers model, the path of a model directory, an object with a
            ``save_pretrained`` for all but the weights, or None for nothing.
        tokenizer: an object with a ``save_pretrained`` of its own; so is ``processor``.
        base: a model directory whose files are taken where nothing else gives them.
    """

    origin: object | None = None
    tokenizer: Any = None
    processor: Any = None
    base: Path | None = None


def write_companions(
    companions: Companions, directory: Path, dtype: str | None, *, untied: bool, strict: bool
) -> tuple[list[Path], list[str]]:
    """Write the files that belong beside the weights into an empty directory.

    Args:
        companions: where they come from.
        directory: where to.
        dtype: the torch name of the dtype that weights are written in, for ``config.json``; None leaves it.
        untied: weights that the configuration calls tied are written each for itself.
        strict: raise what fails.

    Returns:
        The files, and what failed.

    Raises:
        CompanionError: something failed, and ``strict`` is set.
    """
    failures = []
    for what, step in _steps(companions, directory, dtype, untied=untied):
        if failure := _failure(step):
            if strict:
                msg = f"{what} could not be saved: {failure}"
                raise CompanionError(msg)
            failures.append(f"{what} could not be saved: {failure}")
    return sorted(path for path in directory.rglob("*") if path.is_file()), failures


def _steps(
    companions: Companions, directory: Path, dtype: str | None, *, untied: bool
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what there is to do, later steps over earlier ones: what it is called, and a function that does it."""
    origin, givers = companions.origin, [companions.tokenizer, companions.processor]
    patterns = (
        _OTHER_PATTERNS if any(giver is not None for giver in givers) else _OTHER_PATTERNS + _TOKENIZER_PATTERNS
    )
    for source in (companions.base, origin):
        if isinstance(source, Path):
            yield f"files of {source}", partial(_copy, source, directory, patterns)
    if hasattr(origin, "state_dict"):
        yield f"the configuration of {type(origin).__name__}", partial(_save_model, origin, directory, untied=untied)
    elif origin is not None and not isinstance(origin, Path):
        givers.insert(0, origin)
    for giver in givers:
        if giver is not None:
            yield type(giver).__name__, partial(giver.save_pretrained, directory)
    if dtype is not None:
        yield "the dtype in config.json", partial(_set_dtype, directory / "config.json", dtype)


def _failure(step: Callable[[], object]) -> str | None:
    try:
        step()
    except Exception as error:  # noqa: BLE001 - whatever others' code raises costs no weights
        return f"{type(error).__name__}: {error}"
    return None


def _save_model(model: Any, directory: Path, *, untied: bool) -> None:
    """Let a model's own ``save_pretrained`` write all but the weights, which it is given none of.

    It is called on a shallow copy with a configuration of its own, because it writes into the configuration.
    """
    # Not copy.copy(): FSDP2 gives modules a class that makes another of its copies.
    twin = object.__new__(type(model))
    twin.__dict__.update(model.__dict__)
    twin.config = copy.deepcopy(model.config)
    if getattr(model, "_hf_peft_config_loaded", False):  # Adapters are none of these weights.
        twin._hf_peft_config_loaded = False
    if untied:
        twin.config.tie_word_embeddings = False
    if getattr(model, "generation_config", None) is not None:
        twin.generation_config = copy.deepcopy(model.generation_config)
    logging = sys.modules["transformers.utils.logging"]
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        twin.save_pretrained(directory, state_dict={})
    finally:
        if shown:
            logging.enable_progress_bar()


def _copy(origin: Path, directory: Path, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        for path in origin.glob(pattern):
            # Indexes of weights match the configurations' pattern where the variant is called so.
            if path.is_file() and not path.name.startswith("adapter_") and ".safetensors.index." not in path.name:
                target = directory / path.relative_to(origin)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)


def _set_dtype(config: Path, dtype: str) -> None:
    if not config.is_file():
        return
    content = json.loads(config.read_text(encoding="utf-8"))
    # transformers 4 writes torch_dtype, transformers 5 dtype; both are read.
    keys = {"dtype", "torch_dtype"} & set(content) or {"dtype"}
    if any(content.get(key) != dtype for key in keys):
        content.update(dict.fromkeys(keys, dtype))
        config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_companions(tokenizer: object, processor: object) -> None:
    """Refuse what cannot give companions.

    Raises:
        InvalidArgumentError: a tokenizer or processor without ``save_pretrained``.
    """
    for name, thing in (("tokenizer", tokenizer), ("processor", processor)):
        if thing is not None and not callable(getattr(thing, "save_pretrained", None)):
            msg = f"{name}={type(thing).__name__}: expected an object with a save_pretrained method"
            raise InvalidArgumentError(msg)
