"""What is known of transformers models here. transformers is looked for among loaded modules and never imported.

Beside public attributes this touches three of transformers 5's own: ``_weight_conversions``, ``dot_natural_key`` and
``get_model_conversion_mapping``. Where they are missing, nothing is sorted and nothing is warned of.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from streamexport.errors import UnsupportedSourceError


def is_transformers_model(module: object) -> bool:
    """Return whether it is a transformers model, without importing transformers."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def declared_ties(model: torch.nn.Module) -> Mapping[str, str] | None:
    """Return the names that the model declares tied, each with the one it takes its value from; None for no say."""
    # transformers 5 keeps {target: source} with full names, empty when the config says untied.
    declared = getattr(model, "all_tied_weights_keys", None)
    return dict(declared) if isinstance(declared, Mapping) else None


def conversion_notices(model: Any) -> Sequence[str]:
    """Say it where transformers keeps a model under other names than its checkpoints have (fused experts, say)."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        mapping = sys.modules.get("transformers.conversion_mapping")
        # The first call in a process compiles some 900 patterns, which takes a tenth of a second.
        find = getattr(mapping, "get_model_conversion_mapping", lambda *_, **__: ())
        conversions = find(model, add_legacy=False)
    if not conversions:
        return ()
    warning = (
        f"transformers keeps {type(model).__name__} in memory under other names or shapes than in checkpoints, "
        "and save_pretrained would undo that: these files have the names and shapes in memory"
    )
    return (warning,)


def save_order(model: Any, names: Sequence[str]) -> Sequence[str]:
    """Return the names in the order in which save_pretrained fills shards: sorted, for a model that was loaded."""
    natural_key = getattr(sys.modules.get("transformers.core_model_loading"), "dot_natural_key", None)
    if natural_key is None or getattr(model, "_weight_conversions", None) is None:
        return names
    return sorted(names, key=natural_key)


def check_parts(model: torch.nn.Module) -> None:
    """Refuse a model with parts whose weights are not what its state dict says.

    Raises:
        UnsupportedSourceError: a quantised model or a PEFT adapter layer, by name.
    """
    for name, part in model.named_modules():
        if quantizer := getattr(part, "hf_quantizer", None):
            msg = (
                f"{type(part).__name__} is quantised by {type(quantizer).__name__}, which keeps weights in a form "
                "of its own: call dequantize() on it first, or save it with its own save_pretrained"
            )
            raise UnsupportedSourceError(msg)
        if type(part).__module__.startswith("peft.tuners."):
            msg = (
                f"layer {name!r} is a PEFT adapter layer ({type(part).__name__}), and its names are the adapter's: "
                "call merge_and_unload() first, or save the adapter with its own save_pretrained"
            )
            raise UnsupportedSourceError(msg)
