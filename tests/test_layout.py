import json

import pytest
import torch
from oracles import assert_same, header, load
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from streamexport import InvalidArgumentError, export_sharded, plan_export


def llama(**options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, **options))


@pytest.fixture
def tied():
    return llama(tie_word_embeddings=True)


def test_tied_weights_are_written_twice_on_request(tied, tmp_path):
    """D42: a consumer that needs the head; parameters are counted once all the same."""
    once = export_sharded(tied, tmp_path / "once")
    twice = export_sharded(tied, tmp_path / "twice", tied="duplicate")
    assert once.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert not twice.tied
    assert_same(load(tmp_path / "twice"), load(tmp_path / "once") | {"lm_head.weight": tied.lm_head.weight})
    assert twice.total_parameters == once.total_parameters


@pytest.mark.parametrize("options", [{"include": "lm_head*"}, {"exclude": "model.embed*"}])
def test_a_tied_name_is_written_where_the_one_that_holds_it_is_not(tied, options, tmp_path):
    """Nothing that was asked for is missing."""
    export_sharded(tied, tmp_path, **options)
    assert torch.equal(load(tmp_path)["lm_head.weight"], tied.lm_head.weight)


def test_a_pair_that_has_come_apart_is_written_with_a_config_that_says_so(tied, tmp_path):
    """Values differ: both are there after a reload, with the live config as it was."""
    tied.lm_head.weight = nn.Parameter(torch.randn(31, 16))
    report = export_sharded(tied, tmp_path)
    assert "'lm_head.weight' is declared tied" in report.warnings[0]
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    assert tied.config.tie_word_embeddings is True
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(dict(loaded.named_parameters()), dict(tied.named_parameters()))


def test_names_can_be_changed_by_a_mapping_or_a_function(tmp_path):
    """The values stay; patterns are matched before."""
    values = {"a.weight": torch.ones(2), "b.weight": torch.zeros(3), "c": torch.ones(4)}
    export_sharded(values, tmp_path / "mapping", rename={"c": "d"}, exclude="a*")
    assert_same(load(tmp_path / "mapping"), {"b.weight": values["b.weight"], "d": values["c"]})
    export_sharded(values, tmp_path / "function", rename=lambda name: f"base.{name}")
    assert_same(load(tmp_path / "function"), {f"base.{name}": value for name, value in values.items()})


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"a": "b"}, "'a' and 'b' the same name, 'b'"),
        ({"x": "y"}, "names 'x', which is not among the 2"),
        (lambda name: None, "makes None of 'a'"),
        (lambda name: "", "makes '' of 'a'"),
        (3, "a mapping of names to names, or a function"),
    ],
)
def test_a_renaming_that_loses_a_tensor_is_refused(rename, message):
    """Both are named."""
    with pytest.raises(InvalidArgumentError, match=message):
        plan_export({"a": torch.ones(1), "b": torch.ones(2)}, rename=rename)


class Pair(nn.Module):
    """As reinforcement learning wraps models (D36)."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy
        self.value = nn.Linear(16, 1)


def test_a_part_is_exported_as_if_it_were_the_whole(tied, tmp_path):
    """D36: names, ties, configuration; through wrappers at any place."""
    tied.save_pretrained(tmp_path / "alone")
    pair = torch.compile(Pair(torch.compile(tied, backend="eager")), backend="eager")
    export_sharded(pair, tmp_path / "part", submodule="policy")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "part" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    export_sharded(pair, tmp_path / "layer", submodule="policy.model.layers.0.mlp")
    assert set(load(tmp_path / "layer")) == {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}


def test_a_part_that_is_not_there_is_refused(tied):
    """With the parts that are; and of what is no module."""
    with pytest.raises(InvalidArgumentError, match="no such part; it has policy, value"):
        plan_export(Pair(tied), submodule="actor")
    with pytest.raises(InvalidArgumentError, match="no such part"):
        plan_export(Pair(tied), submodule="")
    with pytest.raises(InvalidArgumentError, match="use include and rename"):
        plan_export({"a": torch.ones(1)}, submodule="a")


def test_only_what_is_trained_is_written_on_request(tmp_path):
    """D29: a frozen backbone is left out; a model without anything to train is an error."""
    model = llama()
    model.requires_grad_(requires_grad=False)
    model.model.layers[0].mlp.requires_grad_()
    export_sharded(model, tmp_path, trainable_only=True)
    assert_same(load(tmp_path), {name: value for name, value in model.named_parameters() if value.requires_grad})
    model.requires_grad_(requires_grad=False)
    with pytest.raises(InvalidArgumentError, match="all are left out"):
        plan_export(model, trainable_only=True)
    with pytest.raises(InvalidArgumentError, match="nothing tells whether"):
        plan_export(tmp_path, trainable_only=True)


def dtypes(directory):
    found = header(directory / "model.safetensors")
    return {name: entry["dtype"] for name, entry in found.items() if name != "__metadata__"}


def test_what_a_model_declares_is_kept_in_float32(tmp_path):
    """T5 keeps its wo layers for float16 alone; a strict declaration counts for bfloat16, too."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=31, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(config)
    export_sharded(model, tmp_path / "half", dtype="float16")
    found = dtypes(tmp_path / "half")
    assert {name for name, dtype in found.items() if dtype == "F32"} == {name for name in found if ".wo." in name}
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "float16"
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path / "half")
    assert_same(load(tmp_path / "half"), {name: loaded.state_dict()[name] for name in found})
    export_sharded(model, tmp_path / "bf16", dtype="bfloat16")
    assert set(dtypes(tmp_path / "bf16").values()) == {"BF16"}
    model._keep_in_fp32_modules_strict = {"SelfAttention"}
    export_sharded(model, tmp_path / "strict", dtype="bfloat16")
    found = dtypes(tmp_path / "strict")
    assert {name for name, dtype in found.items() if dtype == "F32"} == {n for n in found if "SelfAttention" in n}


def test_what_the_caller_names_is_kept_in_float32(tmp_path):
    """Also what is stored in another type; a pattern without effect is said, one without a cast refused."""
    values = {"a.norm": torch.rand(3), "b.norm": torch.rand(3).bfloat16(), "c": torch.rand(3), "n": torch.arange(3)}
    report = export_sharded(values, tmp_path, dtype="float16", keep_in_fp32=["*.norm", "x"])
    assert dtypes(tmp_path) == {"a.norm": "F32", "b.norm": "F32", "c": "F16", "n": "I64"}
    assert report.warnings == ("keep_in_fp32='x' matches no tensor",)
    with pytest.raises(InvalidArgumentError, match="needs a dtype"):
        plan_export(values, keep_in_fp32="a")


def test_unknown_choices_are_refused(tied):
    """Before anything is read."""
    with pytest.raises(InvalidArgumentError, match="expected one of 'drop', 'duplicate'"):
        plan_export(tied, tied="keep")


def test_values_that_a_cast_makes_infinite_are_counted(tmp_path):
    """By tensor; what was infinite or no number before is none of these, and neither is what fits."""
    values = {
        "large": torch.full((70_000,), 1e5),
        "mixed": torch.tensor([1.0, float("inf"), 7e4, float("nan"), -float("inf"), -1e9]),
        "brain": torch.full((3,), 1e30).bfloat16(),
        "double": torch.full((2,), 1e300, dtype=torch.float64),
        "fits": torch.tensor([65504.0, float("inf")]),
        "half": torch.full((4,), float("inf")).half(),
        "column": torch.tensor([[1.0, 7e4], [2.0, 8e4]]).t(),
    }
    report = export_sharded(values, tmp_path, "40KB", dtype="float16", max_host_memory="256KiB")
    assert sorted(report.warnings) == [
        "'brain': 3 of its values are too large for float16, and became inf",
        "'column': 2 of its values are too large for float16, and became inf",
        "'double': 2 of its values are too large for float16, and became inf",
        "'large': 70000 of its values are too large for float16, and became inf",
        "'mixed': 2 of its values are too large for float16, and became inf",
    ]
    assert_same(load(tmp_path), {name: value.half().contiguous() for name, value in values.items()})
    assert not export_sharded(values, tmp_path / "wide", dtype="float64").warnings
    assert len(export_sharded(values, tmp_path / "bf16", dtype="bfloat16").warnings) == 1


def test_a_vocabulary_that_the_configuration_does_not_know_is_reported(tied, tmp_path):
    """D47: from_pretrained would refuse the files; a vocabulary that was resized as it should is none."""
    tied.resize_token_embeddings(40)
    assert export_sharded(tied, tmp_path).warnings == ()
    tied.config.vocab_size -= 3
    (warning,) = export_sharded(tied, tmp_path).warnings
    assert "config.json says vocab_size 37, and 'model.embed_tokens.weight' 40 rows" in warning
