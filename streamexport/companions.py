"""The files beside the weights that make a directory loadable: configuration, custom code, tokenizer, processor.

Each kind is written on its own, and one that fails costs no weights: it becomes a warning, or an error before any
weight is read where the caller is strict.
"""

import copy
import json
import shutil
import sys
import tempfile
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
)
_TEMPLATE_PATTERNS = ("chat_template*", "additional_chat_templates/*.jinja")
_MODEL_PATTERNS = ("*config*.json", "*.py")


_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")


@dataclass(frozen=True, slots=True)
class Companions:
    """Where the files beside the weights come from.

    Attributes:
        out_dir: the output directory, as it is before the export.
        origin: what weights come from: a transformers model, the path of a model directory, an object with a
            ``save_pretrained`` for all but the weights, or None for nothing.
        tokenizer: an object with a ``save_pretrained`` of its own; so is ``processor``.
        base: a model directory whose files are taken where nothing else gives them.
    """

    out_dir: Path
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
    for what, *attempts in _steps(companions, directory, dtype, untied=untied):
        for attempt in attempts:
            # Each in a folder of its own: half of what it should have written is not to be seen.
            with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
                failure = _failure(attempt, Path(folder))
                if failure is None:
                    left_out = _merge(Path(folder), directory)
                    failures += [
                        f"{what} wrote {name}, which is left out: it is named like weights" for name in left_out
                    ]
                    break
            if attempt is attempts[0]:
                failures.append(f"{what} could not be saved: {failure}")
    if failures and strict:
        raise CompanionError(failures[0])
    return sorted(path for path in directory.rglob("*") if path.is_file()), failures


Step = Callable[[Path], object]
"""Writes files into an empty folder."""


def _steps(
    companions: Companions, directory: Path, dtype: str | None, *, untied: bool
) -> Iterator[tuple[str, Step] | tuple[str, Step, Step]]:
    """Yield what there is to do, later steps over earlier ones: its name, how, and what if that fails."""
    origin, tokenizer, processor = companions.origin, companions.tokenizer, companions.processor
    is_model = hasattr(origin, "state_dict")
    patterns: tuple[str, ...] = _TEMPLATE_PATTERNS
    if tokenizer is None and getattr(processor, "tokenizer", None) is None:
        patterns += _TOKENIZER_PATTERNS
    if origin is None or isinstance(origin, Path) or is_model:  # No adapter.
        patterns += _MODEL_PATTERNS
    for source in (companions.base, origin):
        if isinstance(source, Path):
            yield f"files of {source}", partial(_copy, source, patterns)
    if is_model:
        save = partial(_save_model, origin, dtype=dtype, untied=untied)
        yield f"the configuration of {type(origin).__name__}", save, partial(save, generation=False)
    elif origin is not None and not isinstance(origin, Path):
        yield type(origin).__name__, partial(_save_adapter, origin, companions.out_dir)
    for giver in (tokenizer, processor):
        if giver is not None:
            yield type(giver).__name__, giver.save_pretrained
    if dtype is not None:
        yield "the dtype in config.json", partial(_set_dtype, directory / "config.json", dtype)


def _failure(step: Step, folder: Path) -> str | None:
    try:
        step(folder)
    except Exception as error:  # noqa: BLE001 - whatever others' code raises costs no weights
        return f"{type(error).__name__}: {error}"
    return None


def _merge(folder: Path, directory: Path) -> list[str]:
    """Move a step's files to the others, over those of the same names; return the names of weights among them."""
    left_out = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        if path.name.endswith(_WEIGHT_SUFFIXES) or ".safetensors.index." in path.name:
            left_out.append(str(name))
            continue
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        # By copying: a link to somewhere else would not be the file.
        shutil.copyfile(path, directory / name)
    return left_out


def _save_model(model: Any, folder: Path, *, dtype: str | None, untied: bool, generation: bool = True) -> None:
    """Save copies of a model's configurations, and its code where it is not transformers' own.

    ``save_pretrained`` itself writes dtype and architectures into the live configuration, and imports DeepSpeed where
    it is installed. A class that overrides it may write more, and is asked to: without weights, on a copy.
    """
    # Not copy.copy(): FSDP2 gives modules a class that makes another of its copies.
    twin = object.__new__(type(model))
    twin.__dict__.update(model.__dict__)
    twin.config = copy.deepcopy(model.config)
    if dtype is not None:
        twin.config.dtype = dtype
    if untied:
        twin.config.tie_word_embeddings = False
    twin.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    can_generate = generation and model.can_generate()
    if can_generate:
        twin.generation_config = copy.deepcopy(model.generation_config)
    transformers = sys.modules["transformers.modeling_utils"]
    if generation and type(model).save_pretrained is not transformers.PreTrainedModel.save_pretrained:
        if getattr(model, "_hf_peft_config_loaded", False):  # Adapters are none of these weights.
            twin._hf_peft_config_loaded = False
        twin.save_pretrained(folder, state_dict={})
        return
    if getattr(model, "_auto_class", None) is not None:
        transformers.custom_object_save(twin, folder, config=twin.config)
    twin.config.save_pretrained(folder)
    if can_generate:
        twin.generation_config.save_pretrained(folder)


def _save_adapter(adapter: Any, out_dir: Path, folder: Path) -> None:
    """Save an adapter's configuration, and its model card over what the earlier one says."""
    if (out_dir / "README.md").is_file():
        shutil.copyfile(out_dir / "README.md", folder / "README.md")
    adapter.save_pretrained(folder)


def _copy(origin: Path, patterns: Sequence[str], folder: Path) -> None:
    for pattern in patterns:
        for path in origin.glob(pattern):
            # Indexes of weights match the configurations' pattern where the variant is called so.
            if path.is_file() and not path.name.startswith("adapter_") and ".safetensors.index." not in path.name:
                target = folder / path.relative_to(origin)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)


def _set_dtype(config: Path, dtype: str, folder: Path) -> None:
    if not config.is_file():
        return
    content = json.loads(config.read_text(encoding="utf-8"))
    # transformers 4 writes torch_dtype, transformers 5 dtype; both are read.
    keys = {"dtype", "torch_dtype"} & set(content) or {"dtype"}
    if any(content.get(key) != dtype for key in keys):
        content.update(dict.fromkeys(keys, dtype))
        (folder / config.name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check_companions(tokenizer: object, processor: object) -> None:
    """Refuse what cannot give companions.

    Raises:
        InvalidArgumentError: a tokenizer or processor without ``save_pretrained``.
    """
    for name, thing in (("tokenizer", tokenizer), ("processor", processor)):
        if thing is not None and not callable(getattr(thing, "save_pretrained", None)):
            msg = f"{name}={type(thing).__name__}: expected an object with a save_pretrained method"
            raise InvalidArgumentError(msg)
