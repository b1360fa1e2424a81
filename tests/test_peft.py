import copy
import json

import peft
import pytest
import torch
from oracles import assert_same, files, load
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.integrations import peft as integration

from streamexport import InvalidArgumentError, UnsupportedSourceError, export_sharded, plan_export

# peft asks transformers by a name that transformers 5.24 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SIZES = {"vocab_size": 331, "hidden_size": 160, "intermediate_size": 200, "num_hidden_layers": 2}


def llama(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, **options))


def adapted(model, **options):
    """A model with LoRA whose second factors are not zero."""
    model = get_peft_model(model, LoraConfig(**{"r": 8, "lora_alpha": 24, "target_modules": "all-linear"} | options))
    fill(model)
    return model


def fill(model):
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.normal_(generator=generator)


def merged(model):
    """What peft makes of it."""
    return copy.deepcopy(model).merge_and_unload()


PATTERNS = {"rank_pattern": {"q_proj": 3, "0.mlp.up_proj": 20}, "alpha_pattern": {"k_proj": 5}}
CASES = {
    "all linear": (llama, {}),
    "patterns": (llama, PATTERNS),
    "rslora": (llama, {"use_rslora": True}),
    "embedding": (llama, {"target_modules": ["embed_tokens", "v_proj"]}),
    "tied embedding": (lambda: llama(tie_word_embeddings=True), {"target_modules": ["embed_tokens", "q_proj"]}),
    "modules to save": (llama, {"modules_to_save": ["lm_head"]}),
    "transposed weights": (
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=71, n_embd=96, n_layer=1, n_head=2)),
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    ),
    "tied on both sides": (
        lambda: llama(tie_word_embeddings=True),
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    ),
    "fused experts": (
        lambda: MixtralForCausalLM(
            MixtralConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2)
        ),
        {"target_modules": ["q_proj", "o_proj"]},
    ),
}


def test_a_merged_model_computes_what_the_live_one_does(tmp_path):
    """After a reload; as it is, and within the rounding of one cast to bfloat16."""
    model = adapted(llama(), lora_alpha=1).eval()
    ids = torch.arange(20)[None]
    export_sharded(model, tmp_path / "fp32", lora="merge")
    export_sharded(model, tmp_path / "bf16", lora="merge", dtype="bfloat16")
    with torch.no_grad():
        live = model(ids).logits
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / "fp32").eval()
        torch.testing.assert_close(loaded(ids).logits, live, atol=1e-5, rtol=1e-5)
        cast = merged(model).eval()
        for parameter in cast.parameters():  # not the rotary buffers, which stay in float32
            parameter.data = parameter.data.bfloat16()
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / "bf16").eval()
        assert torch.equal(loaded(ids).logits, cast(ids).logits)


def limit(case):
    """save_pretrained does not keep to one where it splits tensors."""
    return "1GB" if case == "fused experts" else "300KB"


@pytest.mark.filterwarnings("ignore:.*tied|.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("budget", ["256KiB", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_merging_equals_merge_and_unload_bit_for_bit(case, dtype, budget, tmp_path):
    """In base names, with the base's files; the live model keeps its adapters."""
    build, options = CASES[case]
    model = adapted(build().to(dtype), **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    export_sharded(model, tmp_path / "ours", limit(case), lora="merge", max_host_memory=budget)
    assert_same(dict(model.state_dict()), before)
    merged(model).save_pretrained(tmp_path / "theirs", max_shard_size=limit(case))
    assert_same(load(tmp_path / "ours"), load(tmp_path / "theirs"))
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


@pytest.mark.filterwarnings("ignore:.*tied|.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_the_base_is_written_as_it_was_before_adapters(case, tmp_path):
    """No name of a wrapper, no adapter, the modules as they were before they were saved beside."""
    build, options = CASES[case]
    untouched = build()
    untouched.save_pretrained(tmp_path / "theirs", max_shard_size=limit(case))
    export_sharded(adapted(untouched, **options), tmp_path / "ours", limit(case), lora="base")
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    for name in files(tmp_path / "ours"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name


@pytest.mark.filterwarnings("ignore:.*tied|.*tie_word_embeddings:UserWarning")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
@pytest.mark.parametrize("lora", [None, "adapter"])
@pytest.mark.parametrize(
    "options",
    [*(CASES[case][1] for case in CASES if case != "transposed weights"), {"trainable_token_indices": [1, 2]}],
)
def test_adapters_are_written_as_peft_writes_them(options, lora, tmp_path):
    """The default, in one file whatever the limit: weights, configuration, model card, byte for byte."""
    model = adapted(llama(), **options)
    config = copy.deepcopy(model.peft_config)
    report = export_sharded(model, tmp_path / "ours", "1KB", lora=lora)
    assert model.peft_config == config
    model.save_pretrained(tmp_path / "theirs")
    assert files(tmp_path / "ours") == files(tmp_path / "theirs") == {file.filename for file in report.files}
    for name in files(tmp_path / "theirs"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name
    assert PeftModel.from_pretrained(llama(), tmp_path / "ours")


def test_adapters_in_a_transformers_model_are_written_as_it_writes_them(tmp_path, monkeypatch):
    """add_adapter() puts them into the model itself."""
    # transformers 5.24 asks for a peft that is not released yet.
    monkeypatch.setattr(integration, "check_peft_version", lambda **_: None)
    model = llama()
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    fill(model)
    export_sharded(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours = load_file(tmp_path / "ours/adapter_model.safetensors")
    assert_same(ours, load_file(tmp_path / "theirs/adapter_model.safetensors"))
    assert json.loads((tmp_path / "ours/adapter_config.json").read_text())["r"] == 4
    export_sharded(model, tmp_path / "base", lora="base")
    llama().save_pretrained(tmp_path / "untouched")
    assert_same(load(tmp_path / "base"), load(tmp_path / "untouched"))
    assert (tmp_path / "base/config.json").read_bytes() == (tmp_path / "untouched/config.json").read_bytes()


def test_an_adapter_is_one_file_with_pefts_names(tmp_path):
    """What peft would not find or not know is refused; all of it is trained; a base gives it a tokenizer alone."""
    model = adapted(llama())
    llama().save_pretrained(tmp_path / "base")
    (tmp_path / "base/tokenizer.json").write_text("{}")
    for options in ({"variant": "x"}, {"rename": str.upper}, {"carry_over": True, "base": tmp_path / "base"}):
        with pytest.raises(InvalidArgumentError, match="is not for an adapter"):
            plan_export(model, **options)
    export_sharded(model, tmp_path / "out", trainable_only=True, base=tmp_path / "base")
    model.save_pretrained(tmp_path / "theirs")
    assert files(tmp_path / "out") == {*files(tmp_path / "theirs"), "tokenizer.json"}
    export_sharded(model, tmp_path / "part", submodule="base_model.model")
    ours = load_file(tmp_path / "part/adapter_model.safetensors")
    assert_same(ours, load_file(tmp_path / "theirs/adapter_model.safetensors"))


def test_layers_that_share_a_weight_all_add_to_it(tmp_path):
    """Replicated layers have adapters of their own, and weights in common."""
    model = adapted(llama(), layer_replication=[[0, 2], [1, 2]], target_modules=["q_proj", "up_proj"])
    expected = dict(merged(model).state_dict())
    export_sharded(model, tmp_path, lora="merge", tied="duplicate")
    assert_same(load(tmp_path), expected)


def test_a_part_that_is_an_adapted_layer_itself_is_merged(tmp_path):
    """By its path, and on its own."""
    model = adapted(llama(), target_modules=["lm_head"])
    expected = {"weight": merged(model).lm_head.weight}
    export_sharded(model, tmp_path / "path", lora="merge", submodule="base_model.model.lm_head")
    export_sharded(model.base_model.model.lm_head, tmp_path / "layer", lora="merge")
    assert_same(load(tmp_path / "path"), expected)
    assert_same(load(tmp_path / "layer"), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_trained_tokens_leave_the_base_as_it_was(tied, tmp_path):
    """Their wrapper shows the original under another name than it has."""
    model = llama(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "theirs")
    export_sharded(adapted(model, trainable_token_indices=[1, 2]), tmp_path / "ours", lora="base")
    assert_same(load(tmp_path / "ours"), load(tmp_path / "theirs"))


def test_adapters_inside_of_activation_checkpoints(tmp_path):
    """No name of theirs gets into a full export; what peft does not see is not lost in silence."""
    model = adapted(llama(), target_modules=["q_proj"])
    expected = dict(merged(model).state_dict())
    layers = model.base_model.model.model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    export_sharded(model, tmp_path / "merged", lora="merge")
    export_sharded(model, tmp_path / "base", lora="base")
    assert_same(load(tmp_path / "merged"), expected)
    assert_same(load(tmp_path / "base"), dict(llama().state_dict()))
    with pytest.raises(UnsupportedSourceError, match="peft finds 1 of the 2 layers of adapter 'default'"):
        plan_export(model)


def test_a_mixed_model_is_peeled_like_any_other(tmp_path):
    """Its class is another one."""
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj"]), mixed=True)
    export_sharded(model, tmp_path, lora="base")
    assert_same(load(tmp_path), dict(llama().state_dict()))
    assert (tmp_path / "config.json").exists()


def test_an_adapters_model_card_keeps_what_its_user_wrote(tmp_path):
    """As peft does."""
    for directory in ("ours", "theirs"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "README.md").write_text("---\nlicense: mit\n---\n# Notes\n")
    export_sharded(adapted(llama()), tmp_path / "ours")
    adapted(llama()).save_pretrained(tmp_path / "theirs")
    ours = (tmp_path / "ours/README.md").read_text()
    assert ours == (tmp_path / "theirs/README.md").read_text()
    assert "license: mit" in ours
    assert "# Notes" in ours


def test_several_adapters_are_merged_in_their_order_and_merged_ones_only_once(tmp_path):
    """Those that are active; one that is in the weight already is not added again."""
    model = adapted(llama())
    model.add_adapter("second", LoraConfig(r=4, target_modules=["q_proj"]))
    fill(model)
    model.base_model.set_adapter(["default", "second"])
    expected = dict(merged(model).state_dict())
    export_sharded(model, tmp_path / "out", lora="merge")
    assert_same(load(tmp_path / "out"), expected)
    with pytest.raises(UnsupportedSourceError, match=r"2 are active \(default, second\)"):
        plan_export(model)
    model.base_model.set_adapter("default")
    expected = dict(merged(model).state_dict())
    model.merge_adapter()
    export_sharded(model, tmp_path / "out", lora="merge")
    assert_same(load(tmp_path / "out"), expected)
    with pytest.raises(UnsupportedSourceError, match="merged into its weight: call unmerge_adapter"):
        plan_export(model, lora="base")


def test_weights_in_a_flat_buffer_are_merged_all_the_same(tmp_path):
    """As ZeRO lays them out, and inside wrappers."""
    model = adapted(llama().bfloat16())
    expected = dict(merged(model).state_dict())
    parameters = list(model.parameters())
    flat = torch.cat([parameter.detach().float().reshape(-1) for parameter in parameters])
    flats = {dtype: flat.to(dtype) for dtype in {parameter.dtype for parameter in parameters}}
    start = 0
    for parameter in parameters:
        parameter.data = flats[parameter.dtype][start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    export_sharded(nn.DataParallel(torch.compile(model, backend="eager")), tmp_path, lora="merge")
    assert_same(load(tmp_path), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "q_proj' has an adapter 'default' with DoRA"),
        ({"lora_bias": True, "target_modules": ["head"]}, "with DoRA, a bias"),
        ({"target_modules": ["conv"]}, r"'conv' is a peft\.tuners\.lora\.layer\.Conv2d"),
        ({"trainable_token_indices": {"embed": [1]}, "target_modules": ["q_proj"]}, "'embed' is a peft"),
    ],
)
def test_what_cannot_be_merged_in_blocks_is_refused_by_name(options, message, tmp_path):
    """With what to do instead; nothing is made."""
    model = nn.Module()
    model.q_proj, model.head, model.conv = nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv2d(2, 2, 3)
    model.embed = nn.Embedding(4, 8)
    model = adapted(model, **{"target_modules": ["q_proj"], **options})
    with pytest.raises(UnsupportedSourceError, match=f"(?s){message}.*merge_and_unload"):
        export_sharded(model, tmp_path / "out", lora="merge")
    assert not (tmp_path / "out").exists()


def test_modes_need_adapters_and_a_known_name():
    """Wrong use is refused."""
    with pytest.raises(InvalidArgumentError, match="lora='merge': LlamaForCausalLM has no PEFT adapters"):
        plan_export(llama(), lora="merge")
    with pytest.raises(InvalidArgumentError, match="lora='merge': a dict has no PEFT adapters"):
        plan_export({"w": torch.ones(1)}, lora="merge")
    with pytest.raises(InvalidArgumentError, match="expected one of 'adapter', 'merge', 'base'"):
        plan_export(adapted(llama()), lora="fuse")


def test_adapter_layers_without_a_configuration_are_refused_as_adapters(tmp_path):
    """peft puts layers into any module; base and merged weights can be written."""
    model = nn.Sequential(nn.Linear(40, 50))
    untouched = {name: value.clone() for name, value in model.state_dict().items()}
    peft.inject_adapter_in_model(LoraConfig(r=4, target_modules=["0"]), model)
    del model.peft_config
    with pytest.raises(UnsupportedSourceError, match="no peft_config: use lora="):
        plan_export(model)
    export_sharded(model, tmp_path, lora="base")
    assert_same(load(tmp_path), untouched)
