//! Declarations of the keys that families read, each with its permitted values. Each limit is several times the value
//! in the largest published model. A worker allocates memory by these values before it looks for any tensor, so the
//! limits bound that memory.

use serde_json::Value;
use tutti_kernels::HyperShape;

use super::{
    TokenIds,
    keys::{
        Bound::{Above, AtLeast},
        Entries, Key,
    },
};

/// Maximum number of layers.
pub(crate) const MAX_LAYERS: usize = 4096;
/// Maximum width of the residual stream, of an MLP, and of all heads of an attention layer together.
pub(crate) const MAX_WIDTH: usize = 1 << 20;
/// Maximum number of heads.
const MAX_HEADS: usize = 1 << 16;
/// Maximum width of a head.
const MAX_HEAD_DIM: usize = 1 << 16;
/// Maximum number of token ids of a vocabulary.
const MAX_VOCABULARY: usize = 1 << 24;
/// Maximum number of experts of a layer.
const MAX_EXPERTS: usize = 1 << 14;
/// Maximum number of experts of all layers together. It limits the number of tensors.
pub(crate) const MAX_EXPERTS_OF_ALL_LAYERS: usize = 1 << 17;
/// Maximum number of positions. Kernels take positions as f32, which represents every integer up to this number
/// exactly.
pub(crate) const MAX_CONTEXT: usize = 1 << 24;
/// Maximum number of elements of a tensor.
pub(crate) const MAX_TENSOR: usize = 1 << 36;
/// Maximum number of elements of a token's keys and values, over all layers.
pub(crate) const MAX_KV_OF_A_TOKEN: usize = 1 << 26;
/// Maximum number of elements of a request's state, over all layers.
pub(crate) const MAX_STATE: usize = 1 << 32;
/// Maximum number of channels of a convolution of pixels, and of bins of a frame of sound.
const MAX_CHANNELS: usize = 1 << 13;
/// Maximum number of taps of a convolution.
const MAX_TAPS: usize = 256;
/// Maximum number of names in `architectures`, and of ids in `eos_token_id`.
const MAX_NAMES: usize = 1024;
/// Maximum base of rotary frequencies.
const MAX_THETA: f64 = 1e11;
/// Maximum `factor` by which a rule extends the context.
const MAX_FACTOR: f64 = 1e6;

// Keys that name the family.
pub(crate) const ARCHITECTURES: Key<Vec<String>> = Key::texts("architectures", MAX_NAMES);
pub(crate) const MODEL_TYPE: Key<String> = Key::text("model_type");
pub(crate) const QUANTIZATION_CONFIG: Key<Value> = Key::any("quantization_config");
/// Name of the object that holds the text model's keys in a config that also has a vision encoder.
pub(crate) const TEXT_CONFIG: &str = "text_config";
/// Name of the object that holds the keys of the thinker and of its encoders in a config that also has a talker.
pub(crate) const THINKER_CONFIG: &str = "thinker_config";
/// Name of the object that holds the keys of a vision encoder.
pub(crate) const VISION_CONFIG: &str = "vision_config";
/// Name of the object that holds the keys of an audio encoder.
pub(crate) const AUDIO_CONFIG: &str = "audio_config";

// Keys of a text model.
pub(crate) const VOCAB_SIZE: Key<usize> = Key::size("vocab_size", MAX_VOCABULARY);
pub(crate) const HIDDEN_SIZE: Key<usize> = Key::size("hidden_size", MAX_WIDTH);
pub(crate) const INTERMEDIATE_SIZE: Key<usize> = Key::size("intermediate_size", MAX_WIDTH);
pub(crate) const NUM_HIDDEN_LAYERS: Key<usize> = Key::size("num_hidden_layers", MAX_LAYERS);
pub(crate) const NUM_ATTENTION_HEADS: Key<usize> = Key::size("num_attention_heads", MAX_HEADS);
pub(crate) const NUM_KEY_VALUE_HEADS: Key<usize> = Key::size("num_key_value_heads", MAX_HEADS);
pub(crate) const HEAD_DIM: Key<usize> = Key::size("head_dim", MAX_HEAD_DIM);
pub(crate) const HIDDEN_ACT: Key<String> = Key::choice("hidden_act", &["silu"]);
pub(crate) const MAX_POSITION_EMBEDDINGS: Key<usize> = Key::size("max_position_embeddings", MAX_CONTEXT);
pub(crate) const RMS_NORM_EPS: Key<f64> = Key::number("rms_norm_eps", AtLeast(0.0), 1.0);
pub(crate) const TIE_WORD_EMBEDDINGS: Key<bool> = Key::flag("tie_word_embeddings");
pub(crate) const ATTENTION_BIAS: Key<bool> = Key::flag("attention_bias");
pub(crate) const MLP_BIAS: Key<bool> = Key::flag("mlp_bias");
pub(crate) const LAYER_TYPES: Key<Vec<String>> = Key::texts("layer_types", MAX_LAYERS);
pub(crate) const EOS_TOKEN_ID: Key<TokenIds> = Key::token_ids("eos_token_id", MAX_NAMES);
pub(crate) const DTYPE: Key<String> = Key::text("dtype");
pub(crate) const TORCH_DTYPE: Key<String> = Key::text("torch_dtype");

// Keys of sliding windows. The code that reads a window refuses 0.
pub(crate) const USE_SLIDING_WINDOW: Key<bool> = Key::flag("use_sliding_window");
pub(crate) const SLIDING_WINDOW: Key<usize> = Key::count("sliding_window", MAX_CONTEXT);
pub(crate) const MAX_WINDOW_LAYERS: Key<usize> = Key::count("max_window_layers", MAX_LAYERS);

// Keys of experts. In some families, 0 experts mean a dense model, and the sizes of experts are then ignored.
pub(crate) const NUM_EXPERTS: Key<usize> = Key::count("num_experts", MAX_EXPERTS);
/// The name of `num_experts` in configs of Qwen3-VL-MoE that transformers has saved.
pub(crate) const NUM_LOCAL_EXPERTS: Key<usize> = Key::count("num_local_experts", MAX_EXPERTS);
pub(crate) const NUM_EXPERTS_PER_TOK: Key<usize> = Key::count("num_experts_per_tok", MAX_EXPERTS);
pub(crate) const MOE_INTERMEDIATE_SIZE: Key<usize> = Key::count("moe_intermediate_size", MAX_WIDTH);
pub(crate) const SHARED_EXPERT_INTERMEDIATE_SIZE: Key<usize> =
    Key::size("shared_expert_intermediate_size", MAX_WIDTH);
pub(crate) const NORM_TOPK_PROB: Key<bool> = Key::flag("norm_topk_prob");
pub(crate) const DECODER_SPARSE_STEP: Key<usize> = Key::size("decoder_sparse_step", MAX_LAYERS);
pub(crate) const MLP_ONLY_LAYERS: Key<Vec<usize>> =
    Key::integers("mlp_only_layers", Entries::AtMost(MAX_LAYERS), MAX_LAYERS);

/// Maximum number of pixels or patches per side of a larger square, and of frames per patch.
const MAX_SIDE: usize = 256;

// Keys of vision encoders.
pub(crate) const DEPTH: Key<usize> = Key::size("depth", MAX_LAYERS);
pub(crate) const NUM_HEADS: Key<usize> = Key::size("num_heads", MAX_HEADS);
pub(crate) const PATCH_SIZE: Key<usize> = Key::size("patch_size", MAX_SIDE);
pub(crate) const TEMPORAL_PATCH_SIZE: Key<usize> = Key::size("temporal_patch_size", MAX_SIDE);
pub(crate) const SPATIAL_MERGE_SIZE: Key<usize> = Key::size("spatial_merge_size", MAX_SIDE);
pub(crate) const OUT_HIDDEN_SIZE: Key<usize> = Key::size("out_hidden_size", MAX_WIDTH);
pub(crate) const NUM_POSITION_EMBEDDINGS: Key<usize> = Key::size("num_position_embeddings", MAX_CONTEXT);
pub(crate) const IN_CHANNELS: Key<usize> = Key::size("in_channels", MAX_SIDE);
pub(crate) const VISION_HIDDEN_ACT: Key<String> = Key::choice("hidden_act", &["gelu_pytorch_tanh"]);
pub(crate) const DEEPSTACK_VISUAL_INDEXES: Key<Vec<usize>> =
    Key::integers("deepstack_visual_indexes", Entries::AtMost(MAX_LAYERS), MAX_LAYERS);

// Keys of audio encoders.
pub(crate) const NUM_MEL_BINS: Key<usize> = Key::size("num_mel_bins", MAX_CHANNELS);
pub(crate) const ENCODER_LAYERS: Key<usize> = Key::size("encoder_layers", MAX_LAYERS);
pub(crate) const D_MODEL: Key<usize> = Key::size("d_model", MAX_WIDTH);
pub(crate) const ENCODER_FFN_DIM: Key<usize> = Key::size("encoder_ffn_dim", MAX_WIDTH);
pub(crate) const ENCODER_ATTENTION_HEADS: Key<usize> = Key::size("encoder_attention_heads", MAX_HEADS);
pub(crate) const DOWNSAMPLE_HIDDEN_SIZE: Key<usize> = Key::size("downsample_hidden_size", MAX_CHANNELS);
pub(crate) const OUTPUT_DIM: Key<usize> = Key::size("output_dim", MAX_WIDTH);
pub(crate) const N_WINDOW: Key<usize> = Key::size("n_window", MAX_CONTEXT);
pub(crate) const N_WINDOW_INFER: Key<usize> = Key::size("n_window_infer", MAX_CONTEXT);
pub(crate) const ACTIVATION_FUNCTION: Key<String> = Key::choice("activation_function", &["gelu"]);

// Keys of delta nets.
pub(crate) const FULL_ATTENTION_INTERVAL: Key<usize> = Key::size("full_attention_interval", MAX_LAYERS);
pub(crate) const LINEAR_CONV_KERNEL_DIM: Key<usize> = Key::size("linear_conv_kernel_dim", MAX_TAPS);
pub(crate) const LINEAR_KEY_HEAD_DIM: Key<usize> = Key::size("linear_key_head_dim", MAX_HEAD_DIM);
pub(crate) const LINEAR_VALUE_HEAD_DIM: Key<usize> = Key::size("linear_value_head_dim", MAX_HEAD_DIM);
pub(crate) const LINEAR_NUM_KEY_HEADS: Key<usize> = Key::size("linear_num_key_heads", MAX_HEADS);
pub(crate) const LINEAR_NUM_VALUE_HEADS: Key<usize> = Key::size("linear_num_value_heads", MAX_HEADS);

// Keys of windows with compressed entries, and of hyper-connections.
/// Maximum number of times that the columns of a combination of streams are divided by their sums.
const MAX_ITERATIONS: usize = 1024;
/// Maximum number of tokens per compressed entry.
const MAX_RATIO: usize = 1 << 16;
pub(crate) const COMPRESS_RATIOS: Key<Vec<usize>> =
    Key::integers("compress_ratios", Entries::AtMost(2 * MAX_LAYERS), MAX_RATIO);
/// Name of the object that holds the number of tokens per entry of each type of layer.
pub(crate) const COMPRESS_RATES: &str = "compress_rates";
pub(crate) const COMPRESSED_SPARSE: Key<usize> = Key::size("compressed_sparse_attention", MAX_RATIO);
pub(crate) const HEAVILY_COMPRESSED: Key<usize> = Key::size("heavily_compressed_attention", MAX_RATIO);
pub(crate) const COMPRESS_RATE_CSA: Key<usize> = Key::size("compress_rate_csa", MAX_RATIO);
pub(crate) const COMPRESS_RATE_HCA: Key<usize> = Key::size("compress_rate_hca", MAX_RATIO);
pub(crate) const COMPRESS_ROPE_THETA: Key<f64> = Key::number("compress_rope_theta", Above(1.0), MAX_THETA);
pub(crate) const QK_ROPE_HEAD_DIM: Key<usize> = Key::size("qk_rope_head_dim", MAX_HEAD_DIM);
pub(crate) const Q_LORA_RANK: Key<usize> = Key::size("q_lora_rank", MAX_WIDTH);
pub(crate) const O_GROUPS: Key<usize> = Key::size("o_groups", MAX_HEADS);
pub(crate) const O_LORA_RANK: Key<usize> = Key::size("o_lora_rank", MAX_WIDTH);
pub(crate) const INDEX_N_HEADS: Key<usize> = Key::size("index_n_heads", MAX_HEADS);
pub(crate) const INDEX_HEAD_DIM: Key<usize> = Key::size("index_head_dim", MAX_HEAD_DIM);
pub(crate) const INDEX_TOPK: Key<usize> = Key::size("index_topk", MAX_CONTEXT);
pub(crate) const HC_MULT: Key<usize> = Key::size("hc_mult", HyperShape::MAX_STREAMS);
pub(crate) const HC_SINKHORN_ITERS: Key<usize> = Key::size("hc_sinkhorn_iters", MAX_ITERATIONS);
pub(crate) const HC_EPS: Key<f64> = Key::number("hc_eps", AtLeast(0.0), 1.0);
/// A window of at least one token.
pub(crate) const WINDOW: Key<usize> = Key::size("sliding_window", MAX_CONTEXT);

// Keys of experts of models whose first layers choose experts by the token alone.
pub(crate) const N_ROUTED_EXPERTS: Key<usize> = Key::size("n_routed_experts", MAX_EXPERTS);
pub(crate) const N_SHARED_EXPERTS: Key<usize> = Key::exactly("n_shared_experts", 1);
pub(crate) const NUM_HASH_LAYERS: Key<usize> = Key::count("num_hash_layers", MAX_LAYERS);
pub(crate) const MLP_LAYER_TYPES: Key<Vec<String>> = Key::texts("mlp_layer_types", MAX_LAYERS);
pub(crate) const SCORING_FUNC: Key<String> = Key::choice("scoring_func", &["sqrtsoftplus"]);
pub(crate) const ROUTED_SCALING_FACTOR: Key<f64> =
    Key::number("routed_scaling_factor", Above(0.0), MAX_FACTOR);
pub(crate) const SWIGLU_LIMIT: Key<f64> = Key::number("swiglu_limit", Above(0.0), MAX_FACTOR);

// Keys of rotary position embedding.
pub(crate) const ROPE_SCALING: &str = "rope_scaling";
pub(crate) const ROPE_PARAMETERS: &str = "rope_parameters";
pub(crate) const ROPE_THETA: Key<f64> = Key::number("rope_theta", Above(1.0), MAX_THETA);
pub(crate) const PARTIAL_ROTARY_FACTOR: Key<f64> = Key::number("partial_rotary_factor", Above(0.0), 1.0);
/// Values of `rope_type`. `mrope` is the first vision models' name for plain frequencies with three axes of positions.
const ROPE_TYPES: &[&str] = &["default", "mrope", "yarn", "llama3", "divisors"];
pub(crate) const ROPE_TYPE: Key<String> = Key::choice("rope_type", ROPE_TYPES);
/// The older spelling of `rope_type`. Some files have both keys.
pub(crate) const OLDER_ROPE_TYPE: Key<String> = Key::choice("type", ROPE_TYPES);
/// The divisor of each frequency under the rope_type "divisors", which only GGUF files have.
pub(crate) const DIVISORS: Key<Vec<f64>> = Key::numbers("divisors", MAX_HEAD_DIM / 2, MAX_FACTOR);
pub(crate) const FACTOR: Key<f64> = Key::number("factor", Above(0.0), MAX_FACTOR);
pub(crate) const ORIGINAL_MAX_POSITION_EMBEDDINGS: Key<usize> =
    Key::size("original_max_position_embeddings", MAX_CONTEXT);
pub(crate) const ATTENTION_FACTOR: Key<f64> = Key::number("attention_factor", Above(0.0), MAX_FACTOR);
pub(crate) const MSCALE: Key<f64> = Key::number("mscale", AtLeast(0.0), MAX_FACTOR);
pub(crate) const MSCALE_ALL_DIM: Key<f64> = Key::number("mscale_all_dim", AtLeast(0.0), MAX_FACTOR);
pub(crate) const BETA_FAST: Key<f64> = Key::number("beta_fast", AtLeast(0.0), MAX_FACTOR);
pub(crate) const BETA_SLOW: Key<f64> = Key::number("beta_slow", AtLeast(0.0), MAX_FACTOR);
pub(crate) const LOW_FREQ_FACTOR: Key<f64> = Key::number("low_freq_factor", Above(0.0), MAX_FACTOR);
pub(crate) const HIGH_FREQ_FACTOR: Key<f64> = Key::number("high_freq_factor", Above(0.0), MAX_FACTOR);
pub(crate) const TRUNCATE: Key<bool> = Key::flag("truncate");
pub(crate) const MROPE_SECTION: Key<Vec<usize>> =
    Key::integers("mrope_section", Entries::Exactly(3), MAX_HEAD_DIM);
pub(crate) const MROPE_INTERLEAVED: Key<bool> = Key::flag("mrope_interleaved");

// Placeholders and sentinels of media, and positions of videos.
pub(crate) const AUDIO_TOKEN_ID: Key<u32> = Key::token("audio_token_id");
pub(crate) const AUDIO_START_TOKEN_ID: Key<u32> = Key::token("audio_start_token_id");
pub(crate) const AUDIO_END_TOKEN_ID: Key<u32> = Key::token("audio_end_token_id");
pub(crate) const IMAGE_TOKEN_ID: Key<u32> = Key::token("image_token_id");
pub(crate) const VIDEO_TOKEN_ID: Key<u32> = Key::token("video_token_id");
pub(crate) const VISION_START_TOKEN_ID: Key<u32> = Key::token("vision_start_token_id");
pub(crate) const VISION_END_TOKEN_ID: Key<u32> = Key::token("vision_end_token_id");
pub(crate) const POSITION_ID_PER_SECONDS: Key<f64> =
    Key::number("position_id_per_seconds", Above(0.0), 1000.0);

// Keys of files that say how media are prepared. Values of other than one form are not implemented.
pub(crate) const IMAGE_PROCESSOR_TYPE: Key<String> = Key::choice(
    "image_processor_type",
    &[
        "Qwen2VLImageProcessor",
        "Qwen2VLImageProcessorFast",
        "Qwen2VLImageProcessorPil",
        "Qwen3VLImageProcessor",
    ],
);
pub(crate) const VIDEO_PROCESSOR_TYPE: Key<String> =
    Key::choice("video_processor_type", &["Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"]);
pub(crate) const FEATURE_EXTRACTOR_TYPE: Key<String> =
    Key::choice("feature_extractor_type", &["WhisperFeatureExtractor"]);
pub(crate) const MERGE_SIZE: Key<usize> = Key::size("merge_size", MAX_SIDE);
pub(crate) const MIN_PIXELS: Key<usize> = Key::size("min_pixels", MAX_TENSOR);
pub(crate) const MAX_PIXELS: Key<usize> = Key::size("max_pixels", MAX_TENSOR);
/// Name of the object that holds the limits of an image's size.
pub(crate) const SIZE: &str = "size";
pub(crate) const SHORTEST_EDGE: Key<usize> = Key::size("shortest_edge", MAX_TENSOR);
pub(crate) const LONGEST_EDGE: Key<usize> = Key::size("longest_edge", MAX_TENSOR);
pub(crate) const IMAGE_MEAN: Key<Vec<f64>> = Key::numbers("image_mean", 3, 1.0);
pub(crate) const IMAGE_STD: Key<Vec<f64>> = Key::numbers("image_std", 3, 1.0);
pub(crate) const CAP_PIXELS_PER_FRAME: Key<bool> = Key::flag("cap_pixels_per_frame");
pub(crate) const DO_RESIZE: Key<bool> = Key::flag("do_resize");
pub(crate) const DO_RESCALE: Key<bool> = Key::flag("do_rescale");
pub(crate) const DO_NORMALIZE: Key<bool> = Key::flag("do_normalize");
pub(crate) const DO_CONVERT_RGB: Key<bool> = Key::flag("do_convert_rgb");
pub(crate) const RESCALE_FACTOR: Key<f64> = Key::number("rescale_factor", AtLeast(0.003_92), 0.003_93);
/// Number of bicubic resizing in PIL.
pub(crate) const RESAMPLE: Key<usize> = Key::exactly("resample", 3);
pub(crate) const SAMPLING_RATE: Key<usize> = Key::exactly("sampling_rate", 16_000);
pub(crate) const HOP_LENGTH: Key<usize> = Key::exactly("hop_length", 160);
pub(crate) const N_FFT: Key<usize> = Key::exactly("n_fft", 400);
pub(crate) const FEATURE_SIZE: Key<usize> = Key::size("feature_size", MAX_CHANNELS);
pub(crate) const DITHER: Key<f64> = Key::number("dither", AtLeast(0.0), 0.0);

// Keys of the test models and of the simulated model.
pub(crate) const AUDIO_BYTES_PER_TOKEN: Key<usize> = Key::count("audio_bytes_per_token", MAX_WIDTH);
pub(crate) const AUDIO_ENCODED_TOGETHER: Key<bool> = Key::flag("audio_encoded_together");
pub(crate) const AUDIO_MAX_CALL_TOKENS: Key<u32> = Key::limit("audio_max_call_tokens", MAX_CONTEXT as u32);
#[cfg(feature = "hybrid-test-model")]
pub(crate) const STATE_SIZE: Key<usize> = Key::size("state_size", MAX_WIDTH);

/// Returns the product of the values of keys. Refuses a product above `most` with an error that names the keys.
pub(crate) fn product<const N: usize>(factors: [(&str, usize); N], most: usize) -> Result<usize, String> {
    let product = factors.iter().fold(1u128, |product, &(_, factor)| product.saturating_mul(factor as u128));
    match usize::try_from(product) {
        Ok(product) if product <= most => Ok(product),
        _ => {
            let names = factors.map(|(name, _)| name).join(" x ");
            let values = factors.map(|(_, factor)| factor.to_string()).join(" x ");
            Err(format!("{names}: {values} is {product}, the limit is {most}"))
        }
    }
}
