import copy
import json

import pytest
import torch
from oracles import assert_same, load
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from streamexport import UnsupportedSourceError, export_sharded, plan_export


class Block(nn.Module):
    """A module with every kind of state."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16, bias=False)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("table", torch.arange(7))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("scratch", torch.zeros(1000), persistent=False)

    def forward(self, x):
        return self.norm(self.down(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def compiled(module):
    """Wrap as torch.compile does, without starting a compiler."""
    return torch.compile(module, backend="eager")


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def expected(model):
    """Its state dict, the tied head once."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "head.weight"}


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_module_is_written_as_its_state_dict_names_it(model, expected, tmp_path):
    """Parameters and persistent buffers of any dtype, 0-dim ones too; the tie once, by identity."""
    report = export_sharded(model, tmp_path / "out", "1KB")
    assert_same(load(tmp_path / "out"), expected)
    assert report.tied == {"head.weight": "embed.weight"}
    assert report.total_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_wrappers_leave_no_trace_in_names(model, expected, tmp_path, process_group):
    """D33, D34: compiled blocks, activation checkpoints, a compiled root and DDP, one inside the other."""
    model.blocks[0] = compiled(model.blocks[0])
    model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    model.blocks[2] = compiled(checkpoint_wrapper(model.blocks[2]))
    wrapped = nn.parallel.DistributedDataParallel(compiled(model))
    raw = set(wrapped.state_dict())
    assert any("_orig_mod" in name for name in raw)
    export_sharded(wrapped, tmp_path / "out")
    assert_same(load(tmp_path / "out"), expected)


def test_accelerates_wrappers_leave_no_trace(model, expected, tmp_path):
    """A model that accelerate prepared, compiled region by region."""
    from accelerate.utils import compile_regions

    prepared = compile_regions(model, backend="eager")
    assert any("_orig_mod" in name for name in prepared.state_dict())
    export_sharded(prepared, tmp_path / "out")
    assert_same(load(tmp_path / "out"), expected)


def test_names_are_not_cut_by_their_text(tmp_path):
    """D34: a user's own submodules may be called as wrappers call theirs."""
    module = nn.ModuleDict({"module": nn.Linear(2, 2), "_orig_mod": nn.ModuleDict({"module": nn.Linear(2, 2)})})
    export_sharded(module, tmp_path / "out")
    assert_same(load(tmp_path / "out"), dict(module.state_dict()))


def test_two_names_that_become_one_are_an_error(tmp_path):
    """Both sources are named."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = compiled(nn.Linear(2, 2))
            self._register_state_dict_hook(lambda module, state, *rest: state.update({"inner.weight": torch.ones(1)}))

    with pytest.raises(UnsupportedSourceError, match=r"inner\._orig_mod\.weight.*inner\.weight.*"):
        export_sharded(Odd(), tmp_path / "out")


def test_zero_size_parameters_are_not_taken_for_tied(tmp_path):
    """Their address tells nothing: DeepSpeed's own conversion ties all of them."""
    module = nn.ParameterDict({"a": nn.Parameter(torch.zeros(0, 3)), "b": nn.Parameter(torch.zeros(4, 0))})
    export_sharded(module, tmp_path / "out")
    assert {name: tuple(t.shape) for name, t in load(tmp_path / "out").items()} == {"a": (0, 3), "b": (4, 0)}


def test_extra_state_that_is_no_tensor_is_refused_by_name(tmp_path):
    """Nothing is left out silently; the user may exclude it."""

    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"amax": 1.0}

        def set_extra_state(self, state):
            pass

    with pytest.raises(UnsupportedSourceError, match="'_extra_state'"):
        export_sharded(Extra(2, 2), tmp_path / "out")
    export_sharded(Extra(2, 2), tmp_path / "out", exclude="_extra_state")
    assert set(load(tmp_path / "out")) == {"weight", "bias"}


def test_a_module_of_dtensors_is_exported_where_each_is_whole(tmp_path, process_group):
    """D45: FSDP2 in one process; ties are known by the parameters."""
    from torch.distributed.fsdp import fully_shard

    model = Model()
    expected = {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}
    fully_shard(model)
    assert type(model.embed.weight).__name__ == "DTensor"
    report = export_sharded(model, tmp_path / "module")
    export_sharded(model.state_dict(), tmp_path / "mapping")
    assert report.tied == {"head.weight": "embed.weight"}
    assert_same(load(tmp_path / "module"), expected)
    assert_same(load(tmp_path / "mapping"), expected)


def test_modules_whose_weights_are_elsewhere_are_refused(tmp_path):
    """Meta, partitioned, cut and quantised parameters: by name, before anything is made."""
    partitioned = nn.Linear(4, 4)
    partitioned.weight.ds_id = 0
    cut = nn.Linear(4, 4)
    cut.weight.ds_is_replaced_module = True
    quantised = nn.Linear(4, 4)
    quantised.weight.ds_quant_scale = 1.0
    for module, reason in [
        (nn.Linear(4, 4, device="meta"), "'weight'.*meta"),
        (partitioned, "'weight'.*stage 3"),
        (cut, "'weight'.*AutoTP"),
        (quantised, "'weight'.*ds_quant_scale"),
    ]:
        with pytest.raises(UnsupportedSourceError, match=reason):
            export_sharded(module, tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    def build(**options):
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=211,
            hidden_size=32,
            intermediate_size=88,
            num_hidden_layers=12,
            num_attention_heads=4,
            num_key_value_heads=2,
            **options,
        )
        return LlamaForCausalLM(config)

    return build


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("variant", [None, "ema"])
def test_a_transformers_model_is_written_as_save_pretrained_writes_it(llama, tied, dtype, variant, tmp_path):
    """The same files, byte for byte: shards, index, config.json and generation_config.json."""
    model = llama(tie_word_embeddings=tied).to(dtype)
    report = export_sharded(model, tmp_path / "ours", "50KB", variant=variant)
    assert report.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    model.save_pretrained(tmp_path / "theirs", max_shard_size="50KB", variant=variant)
    names = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == names
    assert {file.filename for file in report.files} == names
    assert len(names) > 5
    for name in names:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name


def test_a_loaded_model_is_written_as_save_pretrained_writes_it(llama, tmp_path):
    """transformers sorts the names of a model that came from from_pretrained, which moves tensors between shards."""
    from transformers import AutoModelForCausalLM

    llama().save_pretrained(tmp_path / "origin")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "origin")
    export_sharded(model, tmp_path / "ours", "50KB")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    names = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == names
    for name in names:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name


def test_chains_of_ties_are_written_once(tmp_path):
    """D23: T5's shared embedding has four names, and save_pretrained keeps the declared source."""
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(vocab_size=31, d_model=8, d_kv=4, d_ff=9, num_layers=1, num_heads=2))
    report = export_sharded(model, tmp_path / "ours")
    assert set(report.tied) == {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    assert set(report.tied.values()) == {"shared.weight"}
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (tmp_path / name / "model.safetensors" for name in ("ours", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_the_live_model_and_its_configuration_are_not_changed(llama, tmp_path):
    """save_pretrained writes dtype and architectures into the live config."""
    model = llama()
    model.config.architectures, model.config.dtype = ["Mine"], torch.float64
    before = copy.deepcopy((model.config.__dict__, model.generation_config.__dict__))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export_sharded(model, tmp_path / "out", dtype="bfloat16")
    assert (model.config.__dict__, model.generation_config.__dict__) == before
    assert_same(dict(model.state_dict()), weights)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["dtype"], written["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])


def test_the_export_loads_through_from_pretrained(llama, tmp_path):
    """D62: as it is, with equal logits; a cast model in the dtype that was written."""
    from transformers import AutoModelForCausalLM

    model = llama().eval()
    for parameter in model.parameters():  # as DeepSpeed does: buffers that are not saved stay in float32
        parameter.data = parameter.data.bfloat16()
    ids = torch.arange(20)[None]
    export_sharded(model, tmp_path / "out", "50KB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    export_sharded(model, tmp_path / "out", dtype="float32")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32


def test_a_head_that_the_config_unties_is_written(llama, tmp_path):
    """save_pretrained drops it by its address, and from_pretrained then starts it at random."""
    model = llama(tie_word_embeddings=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    report = export_sharded(model, tmp_path / "out")
    assert report.tied == {}
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(load(tmp_path / "out"))
    assert report.total_parameters == model.num_parameters()


def test_a_declared_tie_that_came_apart_is_written_twice_with_a_warning(llama, tmp_path):
    """Nothing lost: the values differ."""
    model = llama(tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(torch.randn(211, 32))
    report = export_sharded(model, tmp_path / "out")
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(load(tmp_path / "out"))
    assert "lm_head.weight" in report.warnings[0]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda layer: checkpoint_wrapper(compiled(layer)),
        lambda layer: compiled(checkpoint_wrapper(layer)),
        lambda layer: checkpoint_wrapper(nn.DataParallel(layer)),
        lambda layer: checkpoint_wrapper(checkpoint_wrapper(layer)),
        lambda layer: nn.DataParallel(checkpoint_wrapper(compiled(checkpoint_wrapper(layer)))),
    ],
)
def test_checkpoint_wrappers_nest_with_others_in_any_order(wrap):
    """They take their own segment off every name below them, whatever else is in them."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 2)))
    expected = list(model.state_dict())
    model[0] = wrap(model[0])
    model[1] = wrap(nn.Sequential(wrap(model[1][0])))
    assert sorted(plan_export(model).shards[0].outputs) == sorted(expected)


@pytest.mark.parametrize("tied", [False, True])
def test_the_configuration_tells_the_dtype_of_the_first_parameter(tied, tmp_path):
    """As save_pretrained does, also where parameters differ and shards are filled in another order."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=31, n_embd=16, n_layer=1, n_head=2, tie_word_embeddings=tied, dtype="bfloat16")
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    for part in ("lm_head", "transformer.h.0"):
        model = GPT2LMHeadModel.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
        model.get_submodule(part).float()
        model.save_pretrained(tmp_path / "theirs")
        export_sharded(model, tmp_path / "ours")
        assert (tmp_path / "ours/config.json").read_bytes() == (tmp_path / "theirs/config.json").read_bytes()


def test_parameters_that_are_never_saved_are_counted_as_save_pretrained_counts_them(llama, tmp_path):
    """``_keys_to_ignore_on_save`` leaves them out of the files, num_parameters() does not."""
    model = llama()
    model._keys_to_ignore_on_save = ["lm_head.weight"]
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    export_sharded(model, tmp_path / "ours", "20KB")
    index = "model.safetensors.index.json"
    assert (tmp_path / "ours" / index).read_bytes() == (tmp_path / "theirs" / index).read_bytes()


def test_quantised_transformers_models_are_refused(llama, tmp_path):
    """By the name of what made them so, with what to do instead."""
    model = llama()
    model.hf_quantizer = type("Mxfp4HfQuantizer", (), {})()
    with pytest.raises(UnsupportedSourceError, match=r"Mxfp4HfQuantizer.*dequantize"):
        export_sharded(model, tmp_path / "out")
