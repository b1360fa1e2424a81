"""The files beside the weights that make a directory loadable: configuration, generation configuration, tokenizer."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

# What a model directory holds beside weights, their indexes and training state; for writing a directory again.
_COPIED_PATTERNS = (
    "*config*.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.py",
)


def write_companions(
    origin: object | None, directory: Path, dtype: str | None, *, untied: bool = False
) -> list[Path]:
    """Write the files that belong beside the weights into an empty directory; return them.

    Args:
        origin: a transformers model, the path of a model directory, or None for nothing.
        directory: where to.
        dtype: the torch name of the dtype that weights are written in, for ``config.json``.
        untied: weights that the configuration calls tied are written each for itself.

    Raises:
        ValueError: from transformers, for a configuration that it refuses to save.
    """
    if isinstance(origin, Path):
        _copy_companions(origin, directory, dtype)
    elif origin is not None:
        _save_configs(origin, directory, dtype, untied=untied)
    return sorted(path for path in directory.iterdir() if path.is_file())


def _save_configs(model: Any, directory: Path, dtype: str | None, *, untied: bool) -> None:
    """Save copies: ``save_pretrained`` itself writes dtype and architectures into the live configuration."""
    config = copy.deepcopy(model.config)
    if dtype is not None:
        config.dtype = dtype
    if untied:
        config.tie_word_embeddings = False
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    if model.can_generate():
        copy.deepcopy(model.generation_config).save_pretrained(directory)


def _copy_companions(origin: Path, directory: Path, dtype: str | None) -> None:
    for pattern in _COPIED_PATTERNS:
        for path in origin.glob(pattern):
            if path.is_file() and not path.name.startswith("adapter_") and ".safetensors.index." not in path.name:
                shutil.copyfile(path, directory / path.name)
    config = directory / "config.json"
    if dtype is not None and config.is_file():
        content = json.loads(config.read_text(encoding="utf-8"))
        # transformers 4 writes torch_dtype, transformers 5 dtype; both are read.
        for key in {"dtype", "torch_dtype"} & set(content):
            content[key] = dtype
        config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
