"""Every architecture of transformers that can be built small is written as its save_pretrained writes it."""

import copy
import importlib.util
import shutil
from pathlib import Path

import architectures
import pytest
import torch
import transformers
from oracles import assert_same, files, header, load
from torch import nn
from transformers import modeling_utils

from streamexport import export_sharded

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers' and torch's own
    pytest.mark.skipif(
        not transformers.__version__.startswith("5.24."), reason="architectures are those of transformers 5.24"
    ),
]

NEEDS = {
    "detectron2": ["LayoutLMv2Model"],
    "natten": ["DinatModel"],
    "scipy": ["InklingForConditionalGeneration", "InklingModel"],
    "timm": [
        "EdgeTamModel",
        "EdgeTamVisionModel",
        "FastVlmForConditionalGeneration",
        "FastVlmModel",
        "Gemma3nForConditionalGeneration",
        "Gemma3nModel",
        "OmDetTurboForObjectDetection",
        "PeAudioVideoEncoder",
        "PeAudioVideoModel",
        "PeVideoEncoder",
        "PeVideoModel",
        "PerceptionLMForConditionalGeneration",
        "PerceptionLMModel",
        "TimmBackbone",
        "TimmWrapperModel",
    ],
    "torchaudio": ["HiggsAudioV2TokenizerModel"],
}
# Class names that are not built, and what their failure says.
LEFT_OUT = {
    "VoxtralRealtimeTextModel": "transformers has no attribute",  # its name is in a mapping, but it is not exported
    **{name: library for library, names in NEEDS.items() for name in names},
}
# Models that come through from_pretrained, one or two for each kind of conversion.
LOADED = [
    "LlamaForCausalLM",  # none
    "GPT2LMHeadModel",
    "CLIPModel",  # renamed
    "LlavaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "MixtralForCausalLM",  # one to many
    "Qwen3MoeForCausalLM",
    "NomicBertModel",  # many to one
    "Qwen3VLMoeForConditionalGeneration",  # transposed only where a checkpoint's shapes ask for it
    "Ernie4_5_VLMoeForConditionalGeneration",  # transposed
    "Kimi_K25ForConditionalGeneration",  # permuted
    "Inkling2ForCausalLM",  # interleaved
    "LaraMiniForCausalLM",  # split
    "HYV4ForCausalLM",  # some parameters kept in float32
    "XLNetModel",
]


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)


@pytest.fixture(autouse=True)
def _tidy(tmp_path):
    """Keep no models: pytest would, 700 MB of them."""
    yield
    shutil.rmtree(tmp_path)


@pytest.fixture(autouse=True)
def _storages(monkeypatch):
    """Let save_pretrained plan by the sizes of tensors alone.

    Its planner puts tensors that share a storage into one file, whatever the limit: those into which a conversion
    splits another. Here they get storages of their own.
    """
    revert = modeling_utils.revert_weight_conversion

    def reverted(model, state):
        made = revert(model, state)
        storages = {tensor.untyped_storage().data_ptr() for tensor in made.values()}
        return made if len(storages) == len(made) else {name: tensor.clone() for name, tensor in made.items()}

    monkeypatch.setattr(modeling_utils, "revert_weight_conversion", reverted)


@pytest.mark.parametrize("name", [name for name in architectures.models() if name not in LEFT_OUT])
def test_an_architecture_is_written_as_save_pretrained_writes_it(name, tmp_path):
    """All files, byte for byte, from parameters that are views of one buffer per dtype, as ZeRO lays them."""
    assert_written_as_saved(architectures.build(name), tmp_path)


@pytest.mark.parametrize("name", LOADED)
def test_a_loaded_architecture_is_written_as_save_pretrained_writes_it(name, tmp_path):
    """A model that from_pretrained made is written under the names of its checkpoint."""
    architectures.build(name).save_pretrained(tmp_path / "origin")
    model = getattr(transformers, name).from_pretrained(tmp_path / "origin")
    assert_written_as_saved(model, tmp_path)
    assert shapes(tmp_path / "ours") == shapes(tmp_path / "origin")


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_cannot_be_built(name):
    """The list of exceptions is no longer than it must be."""
    if LEFT_OUT[name] in NEEDS and importlib.util.find_spec(LEFT_OUT[name]):
        pytest.skip(f"{LEFT_OUT[name]} is installed here")
    with pytest.raises((ImportError, AttributeError), match=LEFT_OUT[name]):
        architectures.on_meta(name)


def test_there_are_many_architectures():
    """Nothing is lost by a mapping that became empty."""
    assert set(architectures.models()) >= LEFT_OUT.keys()
    assert len(architectures.models()) - len(LEFT_OUT) >= 900


def assert_written_as_saved(model, directory):
    """Compare with what save_pretrained wrote before the parameters were laid into one buffer."""
    limit = max(1, sum(parameter.nbytes for parameter in model.parameters()) // 10)
    config, model.config = model.config, copy.deepcopy(model.config)
    model.save_pretrained(directory / "theirs", max_shard_size=limit)
    model.config = config  # save_pretrained writes dtype and architectures into it
    lay_flat(model)
    export_sharded(
        model,
        directory / "ours",
        limit,
        max_host_memory="4MiB",
        direct_io=False,
        fsync=False,
        progress=False,
    )
    assert_same(load(directory / "ours"), load(directory / "theirs"))
    assert files(directory / "ours") == files(directory / "theirs")
    for path in (directory / "ours").iterdir():
        assert path.read_bytes() == (directory / "theirs" / path.name).read_bytes(), path.name
    assert_limited(directory / "ours", limit)


def shapes(directory: Path) -> dict[str, torch.Size]:
    """The shapes of all tensors; loading may have cast them."""
    return {name: tensor.shape for name, tensor in load(directory).items()}


def lay_flat(model: nn.Module) -> None:
    """Make the parameters of each dtype views of one buffer."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for parameters in by_dtype.values():
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        pieces = flat.split([parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.data = piece.view(parameter.shape)


def assert_limited(directory: Path, limit: int) -> None:
    """No file holds more than the limit, but for one tensor alone."""
    for path in directory.glob("*.safetensors"):
        ranges = [entry["data_offsets"] for name, entry in header(path).items() if name != "__metadata__"]
        assert len(ranges) == 1 or sum(stop - start for start, stop in ranges) <= limit, path.name
