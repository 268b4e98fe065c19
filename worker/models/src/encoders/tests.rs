use std::{fs, path::Path};

use serde_json::json;
use tutti_kernels::{
    Quantize,
    cpu::{CpuDevice, Isa},
};
use tutti_proto::cluster::v1::MediaGrid;

use super::*;
use crate::{KvCacheDtype, LoadFormat, Model, load};

/// A small Qwen3-Omni with random weights.
fn checkpoint() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let text = json!({"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "max_position_embeddings": 512,
        "rope_scaling": {"rope_type": "default", "mrope_section": [8, 4, 4]}});
    let vision = json!({"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
        "num_position_embeddings": 36, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 2]});
    let audio = json!({"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
        "downsample_hidden_size": 8, "num_mel_bins": 16, "output_dim": 64});
    let config = json!({"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "thinker_config": {
        "text_config": text, "vision_config": vision, "audio_config": audio, "dtype": "float32",
        "audio_token_id": 300, "image_token_id": 301, "video_token_id": 302, "vision_start_token_id": 303,
        "vision_end_token_id": 304, "audio_start_token_id": 305, "audio_end_token_id": 306,
        "position_id_per_seconds": 13}});
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let preprocessor = json!({"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "max_pixels": 65536,
        "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16});
    fs::write(dir.path().join(PreprocessorFiles::NAME), preprocessor.to_string()).unwrap();
    dir
}

fn loaded(dir: &Path, nodes: Option<&[&str]>) -> Result<Box<dyn Model>, LoadError> {
    let options = LoadOptions {
        dir: dir.into(),
        load_format: LoadFormat::Dummy,
        quantize: Quantize::None,
        kv_cache_dtype: KvCacheDtype::Auto,
        max_step_tokens: 64,
        page_tokens: 16,
        expert_parallel: false,
        nodes: nodes.map(|nodes| nodes.iter().map(|&node| node.to_owned()).collect()),
        seed: 3,
    };
    load(&options, CpuDevice::new(1, Isa::detect()).unwrap(), &mut |_| {})
}

fn encode(
    model: &mut dyn Model,
    kind: MediaKind,
    items: &[EncoderItem<'_>],
) -> Result<Vec<u32>, DeviceError> {
    encode_as(model, kind, items, None)
}

fn encode_as(
    model: &mut dyn Model,
    kind: MediaKind,
    items: &[EncoderItem<'_>],
    shape: Option<usize>,
) -> Result<Vec<u32>, DeviceError> {
    let walk = model.declaration().media_input(kind).unwrap().walk;
    let mut out = Vec::new();
    model.encode(walk, items, shape, &mut out)?;
    Ok(out.iter().map(|value| value.to_bits()).collect())
}

fn pixels(frames: usize, seed: usize) -> Vec<u8> {
    // Frames of 16 × 24 pixels.
    (0..frames * 16 * 24 * 3).map(|index| ((index + seed) * 37 % 251) as u8).collect()
}

fn sound(samples: usize, seed: usize) -> Vec<u8> {
    let sample = |index: usize| (((index * 7 + seed) % 200) as f32 / 100.0 - 1.0).to_le_bytes();
    (0..samples).flat_map(sample).collect()
}

#[test]
fn encoders_are_nodes_with_a_walk_per_kind_of_media() {
    let dir = checkpoint();
    let model = loaded(dir.path(), None).unwrap();
    let declaration = model.declaration();
    assert_eq!(declaration.nodes(), ["thinker", AUDIO_ENCODER, VISION_ENCODER]);
    let walks: Vec<&str> = declaration.walks()[3..].iter().map(|walk| &*walk.name).collect();
    assert_eq!(
        walks,
        ["prefill_audio", "audio_encoder_step", "prefill_image", "prefill_video", "vision_encoder_step"]
    );
    let media: Vec<_> = declaration.media().iter().map(|input| (input.kind, input.width)).collect();
    assert_eq!(media, [(MediaKind::Audio, 64), (MediaKind::Image, 192), (MediaKind::Video, 192)]);
    assert_eq!(declaration.embedding_unit(), 64);
    let sound = declaration.media().iter().map(|input| match input.form {
        MediaForm::Pixels(pixels) => pixels.sound,
        _ => None,
    });
    let sentinels = SoundSentinels { begin: 305, end: 306 };
    assert_eq!(sound.collect::<Vec<_>>(), [None, None, Some(sentinels)], "of videos alone");
}

#[test]
fn qwen3_5_has_a_vision_encoder_without_features() {
    let dir = checkpoint();
    let vision = json!({"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
        "num_position_embeddings": 36, "out_hidden_size": 64});
    let mut config = json!({"architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": vision,
        "dtype": "float32", "image_token_id": 301, "video_token_id": 302, "vision_start_token_id": 303,
        "vision_end_token_id": 304, "text_config": {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16, "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [2, 1, 1]}}});
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let mut model = loaded(dir.path(), None).unwrap();
    assert_eq!(model.declaration().nodes(), ["thinker", VISION_ENCODER]);
    let media: Vec<_> = model.declaration().media().iter().map(|input| (input.kind, input.width)).collect();
    assert_eq!(media, [(MediaKind::Image, 64), (MediaKind::Video, 64)]);
    let (image, grid) = (pixels(1, 0), MediaGrid { frames: 1, height: 4, width: 6 });
    let rows = encode(&mut *model, MediaKind::Image, &[EncoderItem { data: &image, grid: Some(grid) }]);
    assert_eq!(rows.unwrap().len(), 6 * 64);
    // A thinker that knows no axes would give pictures the positions of text.
    config["text_config"]["rope_parameters"] = json!({"rope_type": "default"});
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let error = loaded(dir.path(), None).err().unwrap().to_string();
    assert!(error.contains("mrope_section"), "{error}");
}

#[test]
fn an_encoder_gives_the_same_bits_alone_and_beside_the_thinker() {
    let dir = checkpoint();
    let mut whole = loaded(dir.path(), None).unwrap();
    let mut vision = loaded(dir.path(), Some(&[VISION_ENCODER])).unwrap();
    let mut audio = loaded(dir.path(), Some(&[AUDIO_ENCODER])).unwrap();
    let thinker = loaded(dir.path(), Some(&["thinker"])).unwrap();
    for model in [&whole, &vision, &audio] {
        assert_eq!(model.declaration(), thinker.declaration());
    }
    assert!(!vision.has_thinker() && thinker.has_thinker());
    assert_eq!(whole.weight_bytes(), thinker.weight_bytes() + vision.weight_bytes() + audio.weight_bytes());
    let (image, film) = (pixels(1, 0), pixels(3, 5));
    let grid = |frames| Some(MediaGrid { frames, height: 4, width: 6 });
    let item = [EncoderItem { data: &image, grid: grid(1) }];
    let rows = encode(&mut *whole, MediaKind::Image, &item).unwrap();
    assert_eq!(rows.len(), 6 * 192);
    assert!(encode(&mut *vision, MediaKind::Image, &item).unwrap() == rows);
    assert!(encode(&mut *audio, MediaKind::Image, &item).is_err());
    // The last frame of a video of three is repeated.
    let rows = encode(&mut *vision, MediaKind::Video, &[EncoderItem { data: &film, grid: grid(2) }]).unwrap();
    let repeated = [&film[..], &film[2 * 16 * 24 * 3..]].concat();
    let same = encode(&mut *vision, MediaKind::Video, &[EncoderItem { data: &repeated, grid: grid(2) }]);
    assert!(rows.len() == 12 * 192 && same.unwrap() == rows);

    let (long, short) = (sound(6_400, 0), sound(3_300, 9));
    let clips = [EncoderItem::from(&long[..]), EncoderItem::from(&short[..])];
    let rows = encode(&mut *audio, MediaKind::Audio, &clips).unwrap();
    // 40 frames are 5 tokens. The shorter clip has 21 frames, 3 tokens, of which the last is not whole when alone.
    assert_eq!(rows.len(), (5 + 3) * 64);
    assert!(encode(&mut *whole, MediaKind::Audio, &clips).unwrap() == rows);
    let alone = encode(&mut *audio, MediaKind::Audio, &clips[1..]).unwrap();
    assert!(alone[..] != rows[5 * 64..], "clips of a request depend on each other");
}

#[test]
fn padding_changes_no_bit_of_the_embeddings() {
    let dir = checkpoint();
    let mut model = loaded(dir.path(), None).unwrap();
    let (film, clip, other) = (pixels(3, 5), sound(6_400, 0), sound(3_300, 9));
    let grid = Some(MediaGrid { frames: 2, height: 4, width: 6 });
    let video = [EncoderItem { data: &film, grid }];
    let clips = [EncoderItem::from(&clip[..]), EncoderItem::from(&other[..])];
    for (kind, items, tokens) in [(MediaKind::Video, &video[..], 12), (MediaKind::Audio, &clips, 8)] {
        let plain = encode(&mut *model, kind, items).unwrap();
        // The context, which is the most tokens of a call.
        for shape in [tokens, tokens + 1, 64, 509, 512] {
            let padded = encode_as(&mut *model, kind, items, Some(shape)).unwrap();
            assert!(padded == plain, "{kind:?} padded to {shape}");
            // Earlier padding in the buffers has no effect.
            assert!(encode(&mut *model, kind, items).unwrap() == plain, "{kind:?} after {shape}");
        }
        for shape in [tokens - 1, 513] {
            let error = encode_as(&mut *model, kind, items, Some(shape)).unwrap_err().to_string();
            assert!(error.contains("the limit is"), "{error}");
        }
    }
}

#[test]
fn data_that_do_not_fit_are_refused() {
    let dir = checkpoint();
    let mut model = loaded(dir.path(), None).unwrap();
    let image = pixels(1, 0);
    let grid = |frames, height, width| Some(MediaGrid { frames, height, width });
    for grid in
        [None, grid(1, 4, 4), grid(2, 4, 6), grid(1, 0, 6), grid(1, u32::MAX, u32::MAX), grid(1, 24, 1)]
    {
        assert!(encode(&mut *model, MediaKind::Image, &[EncoderItem { data: &image, grid }]).is_err());
    }
    let mut clip = sound(999, 0);
    clip[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    for clip in [&clip[..], &clip[4..404]] {
        assert!(encode(&mut *model, MediaKind::Audio, &[clip.into()]).is_err());
    }
}

#[test]
fn a_checkpoint_without_a_preprocessor_takes_text_alone_and_has_no_encoder_to_load() {
    let dir = checkpoint();
    fs::remove_file(dir.path().join(PreprocessorFiles::NAME)).unwrap();
    let model = loaded(dir.path(), None).unwrap();
    assert_eq!((model.declaration().nodes().len(), model.declaration().media().len()), (1, 0));
    let error = loaded(dir.path(), Some(&[VISION_ENCODER])).err().unwrap().to_string();
    assert!(error.contains("vision_encoder") && error.contains(PreprocessorFiles::NAME), "{error}");
}
