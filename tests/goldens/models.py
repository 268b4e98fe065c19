"""Configurations of the tiny random models: the smallest that still reach every branch of their family."""

V = 320  # vocabulary
AUDIO, IMAGE, VIDEO, VBOS, VEOS, ABOS, AEOS = range(300, 307)  # ids of special tokens
SPECIAL = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=VBOS, vision_end_token_id=VEOS)

DENSE = dict(vocab_size=V, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None)
ROPE = dict(rope_theta=1e6)
MOE = DENSE | dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40)
YARN = dict(type="yarn", original_max_position_embeddings=64)
VISION = dict(depth=3, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=4, temporal_patch_size=2,
              spatial_merge_size=2, out_hidden_size=64, num_position_embeddings=36, hidden_act="gelu_pytorch_tanh")
Q35 = dict(num_hidden_layers=5, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
           linear_value_head_dim=24, linear_conv_kernel_dim=4,
           layer_types=[f"{k}_attention" for k in ("linear", "full", "linear", "linear", "full")],
           rope_parameters=dict(rope_theta=1e7, rope_type="default", partial_rotary_factor=0.25,
                                mrope_section=[2, 1, 1], mrope_interleaved=True))
OMNI = dict(
    text_config=MOE | dict(norm_topk_prob=True, mlp_only_layers=[1],
                           **ROPE, rope_scaling=dict(mrope_section=[8, 4, 4], mrope_interleaved=True, rope_type="default")),
    vision_config=VISION | dict(deepstack_visual_indexes=[0, 2]),
    audio_config=dict(num_mel_bins=16, d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=48,
                      output_dim=64, downsample_hidden_size=8, n_window=50, n_window_infer=200),  # n_window is fixed:
    audio_token_id=AUDIO, audio_start_token_id=ABOS, audio_end_token_id=AEOS,  # "13 tokens a chunk" is hard-coded
    position_id_per_seconds=13, **SPECIAL)
MROPE = ROPE | dict(rope_scaling=dict(mrope_section=[8, 4, 4], mrope_interleaved=True, rope_type="default"))
DEEP = VISION | dict(hidden_size=48, intermediate_size=56, deepstack_visual_indexes=[1, 0])  # heads of 24 elements
V4 = dict(
    vocab_size=V, hidden_size=64, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=1, head_dim=32,
    qk_rope_head_dim=16, q_lora_rank=48, o_groups=2, o_lora_rank=24, max_position_embeddings=4096, sliding_window=16,
    compress_ratios=[0, 4, 128, 4, 128, 0], num_nextn_predict_layers=1,  # the last ratio is the MTP layer's: ignored
    index_n_heads=16, index_head_dim=24, index_topk=8, num_hash_layers=2, n_routed_experts=8, num_experts_per_tok=3,
    n_shared_experts=1, moe_intermediate_size=40, routed_scaling_factor=1.5, swiglu_limit=0.7, rope_theta=1e4,
    compress_rope_theta=1.6e5, rope_scaling=YARN | dict(factor=16.0, beta_fast=32, beta_slow=1),
    bos_token_id=None, eos_token_id=None)


def v4(*ratios, hash_layers, **changes):
    """A V4 whose layers are of a few kinds, to tell the kinds apart."""
    return ("DeepseekV4ForCausalLM", "DeepseekV4Config", V4 | changes | dict(
        num_hidden_layers=len(ratios), compress_ratios=[*ratios, 0], num_hash_layers=hash_layers))


NO_HEAD_DIM = {k: v for k, v in DENSE.items() if k != "head_dim"}  # as most configs before Qwen3's: hidden_size / heads
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)

MODELS = {  # name: (model class, config class, config arguments)
    "llama3": ("LlamaForCausalLM", "LlamaConfig", DENSE | dict(rope_theta=5e5, rope_scaling=LLAMA3, attention_bias=True)),
    "smollm": ("LlamaForCausalLM", "LlamaConfig", NO_HEAD_DIM | dict(
        rope_theta=1e5, num_key_value_heads=1, tie_word_embeddings=True)),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", NO_HEAD_DIM | ROPE | dict(
        use_sliding_window=True, sliding_window=16, max_window_layers=1)),
    "mistral": ("MistralForCausalLM", "MistralConfig", NO_HEAD_DIM | ROPE | dict(sliding_window=16)),
    "qwen3_embedding": ("Qwen3ForCausalLM", "Qwen3Config", DENSE | ROPE | dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", DENSE | ROPE),
    "qwen3_tied": ("Qwen3ForCausalLM", "Qwen3Config", DENSE | ROPE | dict(tie_word_embeddings=True)),
    "qwen3_yarn_swa": ("Qwen3ForCausalLM", "Qwen3Config", DENSE | ROPE | dict(
        rope_scaling=YARN | dict(factor=4.0), use_sliding_window=True, sliding_window=16, max_window_layers=1, attention_bias=True)),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", MOE | ROPE | dict(
        norm_topk_prob=True, mlp_only_layers=[1])),
    "qwen3_moe_nonorm": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", MOE | ROPE | dict(
        norm_topk_prob=False, decoder_sparse_step=2, tie_word_embeddings=True)),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "Qwen3_5Config", dict(
        text_config=DENSE | Q35, vision_config=VISION, **SPECIAL)),
    "qwen3_5_text_tied": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", DENSE | Q35 | dict(tie_word_embeddings=True)),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig", dict(
        text_config=MOE | Q35 | dict(shared_expert_intermediate_size=56), vision_config=VISION, **SPECIAL)),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig",
                         MOE | Q35 | dict(shared_expert_intermediate_size=56)),
    "qwen3_omni": ("Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeConfig", dict(
        thinker_config=OMNI, enable_audio_output=False)),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", dict(
        text_config=DENSE | MROPE | dict(attention_bias=True), vision_config=DEEP, **SPECIAL)),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig", dict(
        text_config=MOE | MROPE | dict(mlp_only_layers=[1]), vision_config=DEEP, **SPECIAL)),
    "deepseek_v4": ("DeepseekV4ForCausalLM", "DeepseekV4Config", V4),
    "v4_sliding": v4(0, 0, 0, hash_layers=0),
    "v4_hca": v4(0, 128, 128, hash_layers=1),
    "v4_csa_all": v4(0, 4, 4, hash_layers=1, index_topk=512),  # above all entries: the indexer's scores decide nothing
    "v4_hash": v4(0, 0, 0, hash_layers=2),  # all layers but the last
}
