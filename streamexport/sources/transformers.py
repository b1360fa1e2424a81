"""What is known of transformers models here. transformers is looked for among loaded modules and never imported.

transformers 5 keeps many models in memory under other names and in other forms than in checkpoints: experts fused
into one tensor, projections split. Its ``save_pretrained`` undoes that by ``revert_weight_conversion``, all at once.
``saved_as`` hands that function traced tensors, which have no values, and learns where each element goes.

Beside public attributes this touches transformers 5's own ``core_model_loading.revert_weight_conversion``, and of a
model ``_weight_conversions`` and ``_keep_in_fp32_modules``. transformers 4 keeps models as they are in checkpoints.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from streamexport.catalog import Output, TensorSpec, as_they_are, segments_of
from streamexport.errors import UnsupportedSourceError
from streamexport.safetensors_format import TORCH_DTYPES, dtype_name
from streamexport.tracing import TracedTensor, UntraceableError


def is_transformers_model(module: object) -> bool:
    """Return whether it is a transformers model, without importing transformers."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def declared_ties(model: torch.nn.Module) -> Mapping[str, str] | None:
    """Return the names that the model declares tied, each with the one it takes its value from; None for no say."""
    # transformers 5 keeps {target: source} with full names, empty when the config says untied.
    declared = getattr(model, "all_tied_weights_keys", None)
    return dict(declared) if isinstance(declared, Mapping) else None


def vocabulary_warnings(model: Any, specs: Mapping[str, TensorSpec]) -> Sequence[str]:
    """Say it where neither the input nor the output embedding is as long as the configuration's vocabulary.

    A vocabulary that was resized by hand makes files that ``from_pretrained`` refuses. A few architectures have
    longer input embeddings by design: in these the output is as long as the vocabulary.
    """
    if not hasattr(model.config, "get_text_config"):
        return ()
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    found: dict[str, int] = {}
    for find in ("get_input_embeddings", "get_output_embeddings"):
        try:
            weight = getattr(getattr(model, find)(), "weight", None)
        except NotImplementedError:  # A model without a vocabulary.
            weight = None
        for name, parameter in model.named_parameters():
            if parameter is weight and name in specs:
                found[name] = specs[name].shape[0]
    if not isinstance(size, int) or not found or size in found.values():
        return ()
    lengths = ", ".join(f"{name!r} {length} rows" for name, length in found.items())
    return (f"config.json says vocab_size {size}, and {lengths}: if it was resized, the configuration should know",)


def fp32_instead_of(model: Any, name: str) -> frozenset[str]:
    """Return the dtypes that a model asks to be float32 instead for one of its tensors, when it is loaded.

    Its patterns are found anywhere in a name, ``*`` stands for anything, as transformers 5 reads them.
    """
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    usual = getattr(model, "_keep_in_fp32_modules", None) or ()
    asked = set()
    if any(re.search(pattern.replace("*", ".*"), name) for pattern in strict):
        asked = {"F16", "BF16"}
    elif any(re.search(pattern.replace("*", ".*"), name) for pattern in usual):
        asked = {"F16"}
    return frozenset(asked)


def saved_as(model: Any, specs: Sequence[TensorSpec]) -> Sequence[Output]:
    """Return what ``save_pretrained`` would write of a model's tensors, and in its order.

    Args:
        model: a transformers model.
        specs: its tensors.

    Raises:
        UnsupportedSourceError: a conversion that does more than move elements, or loses some (by giving two tensors
            one name, say); or a version of transformers without that function.
    """
    loading = sys.modules.get("transformers.core_model_loading")
    if loading is None:
        return as_they_are(specs)
    revert = getattr(loading, "revert_weight_conversion", None)
    if revert is None:
        version = getattr(sys.modules.get("transformers"), "__version__", "unknown")
        msg = (
            f"transformers {version} has no core_model_loading.revert_weight_conversion, by which a model's tensors "
            "get their names in checkpoints: export model.state_dict() to have the names and shapes in memory"
        )
        raise UnsupportedSourceError(msg)
    by_name = {spec.name: spec for spec in specs}
    kept = {spec.name: TracedTensor.of(spec) for spec in specs}
    try:
        made = revert(_Reversible(model, by_name), kept)
    except UntraceableError as error:
        msg = (
            f"{type(model).__name__} is saved in another form than it has in memory, and {error}: "
            "export model.state_dict() to have the names and shapes in memory"
        )
        raise UnsupportedSourceError(msg) from error
    outputs = [_output(name, tensor, by_name) for name, tensor in made.items()]
    _check_all_used(outputs, by_name)
    return outputs


class _Reversible:
    """A model as ``revert_weight_conversion`` sees it: with whole shapes, and the conversions that took place."""

    def __init__(self, model: Any, specs: Mapping[str, TensorSpec]) -> None:
        self._model = model
        self._specs = specs
        conversions = getattr(model, "_weight_conversions", None)
        if conversions is not None:
            # Loading under ZeRO stage 3 keeps all, also those that met no tensor, and reverting one of these renames
            # tensors that it never renamed (transformers 5.24: BERT's LayerNorm.weight becomes LayerNorm.gamma).
            conversions = [conversion for conversion in conversions if conversion.was_used()]
        self._weight_conversions = conversions

    def get_parameter(self, name: str) -> torch.Tensor:
        spec = self._specs.get(name)
        if spec is None:
            found: torch.Tensor = self._model.get_parameter(name)
            return found
        return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _output(name: str, tensor: TracedTensor, specs: Mapping[str, TensorSpec]) -> Output:
    content = tensor.traced.content()
    origins = [specs[segment.tensor] for segment in segments_of(content)]
    spec = TensorSpec(
        name,
        str(dtype_name(tensor.dtype)),
        tuple(tensor.shape),
        parameter=all(origin.parameter for origin in origins),
        trainable=any(origin.trainable for origin in origins),
        fp32_instead_of=frozenset().union(*(origin.fp32_instead_of for origin in origins)),
    )
    return Output(spec, content)


def _check_all_used(outputs: Sequence[Output], specs: Mapping[str, TensorSpec]) -> None:
    """Refuse a conversion that does not use each element once: another version's, or a renaming onto a taken name."""
    used = dict.fromkeys(specs, 0)
    for output in outputs:
        for segment in segments_of(output.content):
            used[segment.tensor] += segment.numel
    for name, numel in used.items():
        if numel != specs[name].numel:
            msg = (
                f"tensor {name!r}: transformers' conversion to its form in checkpoints uses {numel} of its "
                f"{specs[name].numel} elements"
            )
            raise UnsupportedSourceError(msg)


def check_parts(model: torch.nn.Module) -> None:
    """Refuse a model with parts whose weights are not what its state dict says.

    Raises:
        UnsupportedSourceError: a quantised model, by name.
    """
    for part in model.modules():
        if quantizer := getattr(part, "hf_quantizer", None):
            msg = (
                f"{type(part).__name__} is quantised by {type(quantizer).__name__}, which keeps weights in a form "
                "of its own: call dequantize() on it first, or save it with its own save_pretrained"
            )
            raise UnsupportedSourceError(msg)
