import pytest
import torch
from oracles import assert_same, load, weight_map
from transformers import BertConfig, BertModel, MixtralConfig, MixtralForCausalLM, core_model_loading
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from streamexport import InvalidArgumentError, UnsupportedSourceError, export_sharded, plan_export


@pytest.fixture
def mixtral():
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
    )
    return MixtralForCausalLM(config)


def names(plan):
    return {name for shard in plan.shards for name in shard.outputs}


def test_patterns_are_those_of_names_in_the_files(mixtral, tmp_path):
    """An expert can be chosen, although memory has all of them in one tensor; names in memory match nothing."""
    report = export_sharded(mixtral, tmp_path, include="*.experts.1.*", exclude="*.w2.*")
    assert set(load(tmp_path)) == {
        f"model.layers.{layer}.block_sparse_moe.experts.1.{name}.weight" for layer in (0, 1) for name in ("w1", "w3")
    }
    fused = mixtral.model.layers[1].mlp.experts.gate_up_proj
    w3 = load(tmp_path)["model.layers.1.block_sparse_moe.experts.1.w3.weight"]
    assert torch.equal(w3, fused[1, 24:])
    assert report.total_parameters == 4 * 24 * 16
    with pytest.raises(InvalidArgumentError, match="matches none"):
        plan_export(mixtral, include="*gate_up_proj*")


def test_converted_tensors_are_cast_and_selected_by_what_they_are_made_of(mixtral, tmp_path):
    """A cast, a name for float32, and what is trained."""
    mixtral.requires_grad_(requires_grad=False)
    mixtral.model.layers[0].mlp.experts.down_proj.requires_grad_()
    export_sharded(mixtral, tmp_path, dtype="bfloat16", keep_in_fp32="*.2.w2.*", trainable_only=True)
    down = mixtral.model.layers[0].mlp.experts.down_proj.detach()
    prefix = "model.layers.0.block_sparse_moe.experts"
    assert_same(
        load(tmp_path),
        {f"{prefix}.{i}.w2.weight": down[i] if i == 2 else down[i].bfloat16() for i in range(3)},
    )


def test_experts_keep_to_the_limit_where_save_pretrained_does_not(mixtral, tmp_path):
    """huggingface_hub's planner puts all views of one storage into one file, so that files are far over the limit."""
    export_sharded(mixtral, tmp_path / "ours", "4KB")
    mixtral.save_pretrained(tmp_path / "theirs", max_shard_size="4KB")
    assert_same(load(tmp_path / "ours"), load(tmp_path / "theirs"))

    def largest(directory):
        sizes = {}
        for name, file in weight_map(directory).items():
            sizes.setdefault(file, []).append(load(directory)[name].nbytes)
        return max(sum(found) for found in sizes.values() if len(found) > 1)

    assert largest(tmp_path / "ours") <= 4000 < largest(tmp_path / "theirs")


def test_conversions_that_met_no_tensor_are_not_undone(tmp_path):
    """Loading under ZeRO stage 3 keeps all of them, and save_pretrained then renames what it never renamed."""
    config = BertConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    BertModel(config).save_pretrained(tmp_path / "origin")
    model = BertModel.from_pretrained(tmp_path / "origin")
    model._weight_conversions = [*model._weight_conversions, *get_checkpoint_conversion_mapping("legacy")]
    export_sharded(model, tmp_path / "ours")
    assert_same(load(tmp_path / "ours"), load(tmp_path / "origin"))
    model.save_pretrained(tmp_path / "theirs")
    assert any(name.endswith("LayerNorm.gamma") for name in load(tmp_path / "theirs"))  # transformers 5.24


def test_a_version_without_the_function_is_refused_with_a_way_out(mixtral, monkeypatch):
    """It is not public, and may go."""
    monkeypatch.delattr(core_model_loading, "revert_weight_conversion")
    with pytest.raises(UnsupportedSourceError, match=r"has no core_model_loading\.revert.*export model\.state_dict"):
        plan_export(mixtral)
    assert "model.layers.0.mlp.experts.gate_up_proj" in names(plan_export(mixtral.state_dict()))


@pytest.mark.parametrize(
    ("revert", "message"),
    [
        (lambda state: {name: tensor * 2 for name, tensor in state.items()}, r"aten\.mul.* does more than move"),
        (lambda state: {"one": next(iter(state.values()))}, r"'model\.layers.*uses 0 of its"),
        (lambda state: {name: tensor[:1] for name, tensor in state.items()}, "uses 16 of its 496 elements"),
        (lambda state: {name: tensor.half() for name, tensor in state.items()}, "changes the dtype"),
    ],
    ids=["computes", "loses a tensor", "loses a part", "casts"],
)
def test_conversions_that_do_more_than_move_elements_are_refused(mixtral, monkeypatch, revert, message):
    """As another version's may: nothing is guessed, nothing lost."""
    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", lambda _, state: revert(state))
    with pytest.raises(UnsupportedSourceError, match=message):
        plan_export(mixtral)
