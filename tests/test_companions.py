import importlib
import json
import sys

import pytest
import torch
from oracles import assert_same, files, load
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from streamexport import CompanionError, InvalidArgumentError, OutputError, export_sharded, plan_export


@pytest.fixture
def model():
    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def tokenizer():
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))  # noqa: S106
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", chat_template="{{ messages }}")  # noqa: S106


@pytest.fixture
def base(model, tokenizer, tmp_path):
    """A checkpoint with two tensors that the model lacks, a tokenizer, and what training leaves behind."""
    directory = tmp_path / "base"
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    extra = {"mtp.0.weight": torch.rand(3, 5), "mtp.1.weight": torch.rand(70_000)}
    save_file({**load(directory), **extra}, directory / "model.safetensors", {"format": "pt"})
    for name in ("optimizer.pt", "training_args.bin", "pytorch_model.bin", "model.safetensors.index.json.bak"):
        (directory / name).write_text("x")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates/tools.jinja").write_text("{{ tools }}")
    return directory


def names(directory):
    """All files."""
    return {name for name in files(directory) if (directory / name).is_file()}


def test_a_tokenizer_is_saved_beside_the_weights(model, tokenizer, tmp_path):
    """By its own save_pretrained: the same files, in the report too."""
    report = export_sharded(model, tmp_path / "ours", tokenizer=tokenizer)
    model.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    assert names(tmp_path / "ours") == names(tmp_path / "theirs") == {file.filename for file in report.files}
    for name in names(tmp_path / "theirs"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "ours")("a")["input_ids"] == [0]


def test_a_base_gives_what_the_model_does_not(model, base, tmp_path):
    """Tokenizer and templates, also in folders; the model's own configuration; no weights, no training state."""
    model.config.rope_theta = 77.0
    report = export_sharded(model, tmp_path / "out", base=base)
    assert names(tmp_path / "out") == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("chat_template.jinja", "additional_chat_templates/tools.jinja"),
    }
    assert "additional_chat_templates/tools.jinja" in {file.filename for file in report.files}
    model.save_pretrained(tmp_path / "alone")
    assert (tmp_path / "out/config.json").read_bytes() == (tmp_path / "alone/config.json").read_bytes()
    export_sharded(model, tmp_path / "out", base=base)
    assert not [name for name in files(tmp_path / "out") if name.startswith(".")]


def test_a_mapping_gets_the_bases_configuration_in_its_own_dtype(model, base, tmp_path):
    """A state dict has none; what the configuration says of dtypes is made true."""
    weights = {name: value.bfloat16() for name, value in model.state_dict().items()}
    export_sharded(weights, tmp_path / "out", base=str(base))
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert LlamaForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_a_given_tokenizer_comes_before_the_bases(model, tokenizer, base, tmp_path):
    """None of the base's tokenizer files is mixed in."""
    (base / "vocab.txt").write_text("old")
    export_sharded(model, tmp_path / "out", base=base, tokenizer=tokenizer)
    assert "vocab.txt" not in names(tmp_path / "out")
    assert "tokenizer.json" in names(tmp_path / "out")


def test_what_the_model_lacks_is_reported_and_carried_over_on_request(model, base, tmp_path):
    """D39: heads for speculative decoding, streamed from the base's files; patterns and casts are for them, too."""
    report = export_sharded(model, tmp_path / "out", base=base)
    assert "lacks: 'mtp.0.weight', 'mtp.1.weight' (carry_over=True" in report.warnings[0]
    assert_same(load(tmp_path / "out"), dict(model.state_dict()))
    report = export_sharded(
        model, tmp_path / "out", "20KB", base=base, carry_over=True, exclude="mtp.0*", dtype="bfloat16"
    )
    assert not report.warnings
    expected = {name: value.bfloat16() for name, value in load(base).items() if name != "mtp.0.weight"}
    assert_same(load(tmp_path / "out"), expected)


def test_what_is_carried_over_is_neither_trained_nor_doubled(model, base):
    """trainable_only is for the model; a base of other names is no base; without one there is nothing to carry."""
    model.requires_grad_(requires_grad=False)
    model.lm_head.requires_grad_()
    plan = plan_export(model, base=base, carry_over=True, trainable_only=True)
    assert set(plan.shards[0].outputs) == {"lm_head.weight", "mtp.0.weight", "mtp.1.weight"}
    with pytest.raises(InvalidArgumentError, match="the base has no tensor of the model's names"):
        plan_export(model, base=base, carry_over=True, submodule="model")
    assert "is it the checkpoint" in plan_export(model, base=base, submodule="model").warnings[0]
    with pytest.raises(InvalidArgumentError, match="carry_over=True needs base="):
        plan_export(model, carry_over=True)


def test_a_bases_template_stays_where_a_tokenizer_has_none(model, tokenizer, base, tmp_path):
    """And goes where it has one."""
    (base / "chat_template.jinja").write_text("base's")
    export_sharded(model, tmp_path / "own", base=base, tokenizer=tokenizer)
    assert (tmp_path / "own/chat_template.jinja").read_text() == "{{ messages }}"
    tokenizer.chat_template = None
    export_sharded(model, tmp_path / "bases", base=base, tokenizer=tokenizer)
    assert (tmp_path / "bases/chat_template.jinja").read_text() == "base's"


def test_other_shapes_than_the_bases_are_reported(model, base):
    """A vocabulary that was resized."""
    model.resize_token_embeddings(33)
    (_, shapes) = plan_export(model, base=base).warnings
    assert "'model.embed_tokens.weight' [33, 16] instead of [31, 16]" in shapes


def test_a_companion_that_cannot_be_saved_costs_no_weights(model, tokenizer, tmp_path):
    """It is a warning; where the caller is strict an error, before the first weight is read."""
    export_sharded(model, tmp_path / "out")
    model.generation_config.temperature = 0.5  # transformers refuses it without do_sample
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    events = []
    with pytest.raises(
        CompanionError, match=r"(?s)configuration of LlamaForCausalLM could not be saved: .*temperature"
    ):
        export_sharded(model, tmp_path / "out", strict=True, progress=events.append)
    assert not events
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    report = export_sharded(model, tmp_path / "out", tokenizer=tokenizer)
    assert "temperature" in report.warnings[0]
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names(tmp_path / "out")


class Half:
    """A processor that breaks off after its first file."""

    def save_pretrained(self, directory):
        (directory / "tokenizer.json").write_text("{")
        msg = "no"
        raise OSError(msg)


def test_half_of_what_a_step_writes_is_not_published(model, base, tmp_path):
    """A configuration that breaks off, a processor: what was there, or the base gives, stays whole."""
    model.save_pretrained(tmp_path / "out")
    before = (tmp_path / "out/config.json").read_bytes()
    model.config.broken = lambda: 1
    report = export_sharded(model, tmp_path / "out", processor=Half(), base=base)
    assert [warning.partition(" could not")[0] for warning in report.warnings[:2]] == [
        "the configuration of LlamaForCausalLM",
        "Half",
    ]
    assert (tmp_path / "out/config.json").read_bytes() == before
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


class Deep:
    """A processor with files in folders of folders, and a weights file of its own."""

    def save_pretrained(self, directory):
        for name in ("a/b/c.json", "a/d.json", "model.safetensors", "adapter/model-00001-of-00002.safetensors"):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text("{}")


def test_companions_may_lie_deep_and_bring_no_weights(model, tmp_path):
    """What is named like weights would be loaded instead of ours."""
    report = export_sharded(model, tmp_path / "out", "4KB", processor=Deep())
    assert {"a/b/c.json", "a/d.json"} < names(tmp_path / "out")
    assert not (tmp_path / "out/model.safetensors").exists()
    assert any("Deep wrote model.safetensors, which is left out" in warning for warning in report.warnings)


def test_a_folder_that_cannot_be_made_costs_no_earlier_export(model, tmp_path):
    """A file is in its place; and a failure later takes new folders away again."""
    out = tmp_path / "out"
    model.save_pretrained(out)
    (out / "a").write_text("mine")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(OutputError, match="a file is where a folder must be"):
        export_sharded(model, out, processor=Deep())
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (out / "a").unlink()
    before.pop("a")
    shard = plan_export(model, "4KB").shards[1].filename
    (out / shard).mkdir()
    with pytest.raises(OSError, match=shard):
        export_sharded(model, out, "4KB", processor=Deep())
    (out / shard).rmdir()
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_what_cannot_give_companions_is_refused(model, tmp_path):
    """Before anything is made."""
    with pytest.raises(InvalidArgumentError, match="tokenizer=str: expected an object with a save_pretrained"):
        export_sharded(model, tmp_path / "out", tokenizer="gpt2")
    with pytest.raises(InvalidArgumentError, match="base='nowhere': expected a local model directory"):
        export_sharded(model, tmp_path / "out", base="nowhere")
    assert not (tmp_path / "out").exists()


CUSTOM = """
from transformers import LlamaConfig, LlamaForCausalLM

from .layers_of_mine import SIZE


class MyConfig(LlamaConfig):
    model_type = "mine"


class MyModel(LlamaForCausalLM):
    config_class = MyConfig

    def save_pretrained(self, directory, **options):
        super().save_pretrained(directory, **options)
        with open(f"{directory}/mine.txt", "w") as file:
            file.write(str(SIZE))


MyConfig.register_for_auto_class()
MyModel.register_for_auto_class("AutoModelForCausalLM")
"""


def test_custom_code_and_a_classs_own_side_files_come_along(tmp_path, monkeypatch):
    """Modules, the auto_map, and what an overridden save_pretrained writes; the live configuration stays."""
    (tmp_path / "package_of_mine").mkdir()
    (tmp_path / "package_of_mine/__init__.py").write_text("")
    (tmp_path / "package_of_mine/layers_of_mine.py").write_text("SIZE = 16")
    (tmp_path / "package_of_mine/model_of_mine.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("package_of_mine.model_of_mine")
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = mine.MyModel(mine.MyConfig(**sizes, num_attention_heads=2))
    before = dict(model.config.__dict__)
    export_sharded(model, tmp_path / "ours")
    assert model.config.__dict__ == before
    model.save_pretrained(tmp_path / "theirs")
    assert names(tmp_path / "ours") == names(tmp_path / "theirs")
    assert {"mine.txt", "layers_of_mine.py", "model_of_mine.py"} <= names(tmp_path / "ours")
    for name in names(tmp_path / "theirs"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    for name in [name for name in sys.modules if name.startswith("package_of_mine")]:
        del sys.modules[name]
