"""Every architecture of transformers, built small from the default of its configuration class."""

import contextlib
import re

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto import modeling_auto

MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_MAPPING_NAMES,
)
PARAMETERS_LIMIT = 10_000_000
VOCABULARY = 160
MOST_LAYERS = 4
# The first pattern found in a field's name says how large its number may be; None leaves it as it is.
LIMITS = tuple(
    (re.compile(pattern), limit)
    for pattern, limit in [
        (r"token_id|token_index|^layer_types$|kernel|stride|_ids$", None),
        (r"patch_sizes|window_size|image_sizes|feat_extract", None),
        (r"vocab_size", VOCABULARY),
        (r"(key_value|kv|key)_(attention_)?heads$|n_head_kv$", 2),
        (r"mamba_n(um)?_heads$", 8),
        (r"(rope|nope)_head_dim$", 4),
        (r"head_?dim|d_kv$|d_head$|dim_head$|kv_channels$|head_size$", 8),
        (r"heads?$", 4),
        (r"^(\w*_)?(layers?|depths?|blocks?)$|num_block|block_repeats|blocks_per_stage", 2),
        (r"numb_of_layers|attends_per", 2),
        (r"experts_per_tok|^moe_k$|^topk_group$|moe_topk|top_k$", 2),
        (r"experts$", 4),
        (r"n_group$|n_groups$", 2),
        (r"lora_rank$|_rank$", 16),
        (r"moe_intermediate_size", 24),
        (r"intermediate_(size|dim)|ffn_(dim|hidden_size)|d_ff$|mlp_dim|inner|feed_?forward|linear_units", 48),
        (r"max_position|n_positions|max_seq|context_length|max_source|max_target|n_ctx|seq_len|num_position", 64),
        (r"(image|img)_size$", 32),
        (r"patch_size$", 8),
        (r"num_filters$", 4),
        (r"num_quer|num_latents|n_latents|num_denoising", 8),
        (r"hidden_size|d_model|n_embd|embed|_dims?$|^dim|latents$|width|units$|channel|_size$", 32),
    ]
)
RESNET = {"backbone_config": {"model_type": "resnet", "out_features": ["stage2", "stage3", "stage4"]}}
FORECAST = {"prediction_length": 4}
MIMI = {"upsample_groups": 32}
HEADS = {"head_dim": 8}
SWIN = {"embed_dim": 24}
# What a configuration class is called with, by model type.
ARGUMENTS = {
    **dict.fromkeys(["conditional_detr", "dab-detr", "deformable_detr", "detr", "table-transformer"], RESNET),
    "lw_detr": {"projector_scale_factors": [1.0]},
    "reformer": {"is_decoder": True},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    **dict.fromkeys(["autoformer", "informer", "time_series_transformer"], FORECAST),
}
# Fields that must be something else than LIMITS makes of them, by model type, or by class name where that is empty.
OVERRIDES = {
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "DbrxAttentionConfig": {"rope_theta": 10000.0},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma3n_text": {"num_kv_shared_layers": 2, "intermediate_size": [48] * 4},
    "hunyuan_v1_dense": HEADS,
    "hunyuan_v1_moe": HEADS,
    "hunyuan_vl_text": HEADS,
    "ministral": HEADS,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
    },
    "chameleon": {"vocabulary_map": {"<image>": 5, "IMGIMGA": 6}},
    "emu3": {"vocabulary_map": {"<image>": 5, "<|visual token 000000|>": 6}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [24, 12],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    },
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    "granite4_vision": {"deepstack_layer_map": [[-2, 0], [-1, 1]], "downsample_rate": "1/2"},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 3200},
    "apertus1p5": {"image_token_offset": 64, "audio_token_offset": 96},
    "depth_pro": {"patch_size": 32},
    "dac": {"encoder_hidden_size": 8, "decoder_hidden_size": 64},
    "neucodec": {"encoder_hidden_size": 8},
    "xcodec2": {"encoder_hidden_size": 8},
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "longcat_flash": {"zero_expert_num": 2},
    "pocket_tts_audio_tokenizer": MIMI,
    "pocket_tts_audio_tokenizer_decoder": MIMI,
    "mimi": MIMI,
    "mimi_decoder": MIMI,
    "pp_ocrv6_medium_det": {
        "kernel_list": [3, 2, 2],
        "intraclass_block_config": {
            "reduce_channel": [1, 1, 0],
            "return_channel": [1, 1, 0],
            **{
                f"{way}_{length}ratio": [kernel, 1, 1]
                for way in ("vertical_long_to_small_conv", "horizontal_small_to_long_conv", "symmetric_conv_long")
                for length, kernel in (("long", 7), ("mid", 5), ("short", 3))
            },
        },
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "dory": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
    },
    "efficientloftr": {"hidden_size": 256},
    "esmc": {"num_key_value_heads": 4},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 8},
    "dots3_note_text": {"num_key_value_heads": 4},
    "glm5_next_text": {"num_key_value_heads": 4},
    "gradium_phonon_tts": {"num_key_value_heads": 4},
    "hiera": {"masked_unit_size": (8, 8)},
    "mamba2": {"num_heads": 8},
    "cosmos3_edge_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    },
    "hy_v4_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        "qk_rope_head_dim": 8,
        "qk_head_dim": 16,
    },
    "bridgetower": {"hidden_size": 64},
    "bridgetower_text_model": {"hidden_size": 64},
    "bridgetower_vision_model": {"hidden_size": 64},
    "cvt": {"depth": (1, 2, 3)},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "moonshine_streaming": {"num_key_value_heads": 2},
    "donut-swin": SWIN,
    "maskformer-swin": SWIN,
    "swinv2": SWIN,
    "swin2sr": SWIN,
    "t5gemma2_text": {"dropout_rate": 0.0},
    "tvp": {"visual_prompt_size": 4},
    "univnet": {"kernel_predictor_hidden_channels": 8, "model_hidden_channels": 8},
    "bit": {"num_groups": 8},
    "mobilevit": {"num_attention_heads": 2},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 8)},
}


def models() -> list[str]:
    """The names of all classes."""
    names: set[str] = set()
    for mapping in MAPPINGS:
        for entry in mapping.values():
            names.update((entry,) if isinstance(entry, str) else entry)
    return sorted(names)


def build(name: str) -> PreTrainedModel:
    """Build a model with random weights: parameters in bfloat16, buffers in types of their own."""
    model = on_meta(name)
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    tensors[key] = made.setdefault(id(tensor), at_random(tensor))
    return model


def on_meta(name: str) -> PreTrainedModel:
    """Build a model without memory, and see that it is a small one."""
    kind = getattr(transformers, name)
    config = kind.config_class(**ARGUMENTS.get(kind.config_class.model_type, {}))
    shrink(config)
    with torch.device("meta"), no_init_weights():
        model = kind(config)
    model.tie_weights()
    count = model.num_parameters()
    if count > PARAMETERS_LIMIT:
        msg = f"{name} has {count:,} parameters"
        raise ValueError(msg)
    return model


def at_random(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor in memory like one without."""
    parameter = isinstance(tensor, nn.Parameter)
    dtype = torch.bfloat16 if parameter and tensor.is_floating_point() else tensor.dtype
    made = torch.empty(tensor.shape, dtype=dtype)
    if made.is_floating_point() or made.is_complex():
        made.normal_()
    else:
        made.random_(0, 2)
    return nn.Parameter(made, tensor.requires_grad) if parameter else made


def shrink(config: PreTrainedConfig) -> None:
    """Set the numbers of a configuration, and of those inside, to small ones that fit together."""
    settled = keep_some_layers(config)
    for field, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            shrink(value)
        elif field != settled:
            setattr(config, field, smaller(field, value))
    for field, value in OVERRIDES.get(config.model_type or type(config).__name__, {}).items():
        setattr(config, field, value)


def smaller(field: str, value: object) -> object:
    """Return a small value for a field, or the one it has."""
    if is_number(value) and re.search(r"token_(id|index)$", field):
        return value % VOCABULARY if value >= VOCABULARY else value
    limit = next((limit for pattern, limit in LIMITS if pattern.search(field)), None)
    if limit is None:
        return value
    if is_number(value):
        return min(value, limit)
    if isinstance(value, list | tuple) and all(map(is_number, value)):
        if limit <= MOST_LAYERS and "head" not in field:  # how many layers each stage has
            return type(value)(min(number, 1) for number in value)
        return type(value)(number if number < 8 else number // 8 for number in value)
    return value


def is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def keep_some_layers(config: PreTrainedConfig) -> str | None:
    """Keep one layer of each kind that the configuration lists, two at least; return the field that counts them."""
    count = getattr(config, "num_hidden_layers", None)
    lists = {
        field: value
        for field, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == count
    }
    if not lists:
        return None
    kinds: dict[str, int] = {}
    for index, kind in enumerate(zip(*lists.values(), strict=True)):
        kinds.setdefault(str(kind), index)
    kept = sorted(kinds.values())[:MOST_LAYERS] if len(kinds) > 1 else [0, 1]
    for field, value in lists.items():
        setattr(config, field, type(value)(value[index] for index in kept))
    if spec := getattr(config, "_heterogeneity_spec", None):
        spec.per_layer_overrides = {
            kept.index(index): {
                field: value if field.endswith("heads") else smaller(field, value) for field, value in fields.items()
            }
            for index, fields in spec.per_layer_overrides.items()
            if index in kept
        }
    with contextlib.suppress(NotImplementedError):
        config.num_hidden_layers = len(kept)
    return config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
