use std::{
    fs,
    path::{Path, PathBuf},
};

use safetensors::SafeTensors;
use serde_json::json;
use tutti_kernels::{
    Quantize, WeightType,
    cpu::{CpuDevice, Isa},
    cuda::{CudaDevice, KernelCache},
};

use super::{mel::MelFilters, *};
use crate::{
    KvCacheDtype, LoadFormat,
    config::{ConfigFile, ranges},
};

/// Most tokens of a call in these tests.
const TOKENS: usize = 64;

fn options(dir: PathBuf) -> LoadOptions {
    LoadOptions {
        dir,
        load_format: LoadFormat::Auto,
        quantize: Quantize::None,
        kv_cache_dtype: KvCacheDtype::Auto,
        max_step_tokens: 64,
        page_tokens: 16,
        expert_parallel: false,
        nodes: None,
        seed: 1,
    }
}

fn floats(goldens: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let data = goldens.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
    data.into_iter().map(f32::from_le_bytes).collect()
}

fn integers(goldens: &SafeTensors<'_>, name: &str) -> Vec<usize> {
    let data = goldens.tensor(name).unwrap().data().as_chunks::<8>().0.to_vec();
    data.into_iter().map(|value| i64::from_le_bytes(value) as usize).collect()
}

/// Returns the greatest difference of two lists of the same length.
fn greatest(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).fold(0.0, |worst, (a, b)| f32::max(worst, (a - b).abs()))
}

/// Returns the clips of a golden case, whose features are those of all clips side by side.
fn clips(goldens: &SafeTensors<'_>, case: &str, bins: usize) -> Vec<Mel> {
    let values = floats(goldens, &format!("{case}.input_features"));
    let lengths = integers(goldens, &format!("{case}.feature_lens"));
    let all = Mel { bins, frames: lengths.iter().sum(), values };
    let mut first = 0;
    let clip = |&frames: &usize| {
        let values = all.padded(first..first + frames, frames);
        first += frames;
        Mel { bins, frames, values }
    };
    lengths.iter().map(clip).collect()
}

fn encoder<D: Encoder + Dense>(dir: PathBuf, device: &mut D) -> AudioEncoder<D> {
    let file = ConfigFile::read(&dir).unwrap();
    let keys = file.keys().section(ranges::THINKER_CONFIG).unwrap().section(ranges::AUDIO_CONFIG).unwrap();
    let config = AudioConfig::read(&keys, 64, type_of(&dir).0).unwrap();
    AudioEncoder::load(config, &options(dir), TOKENS, device).unwrap()
}

/// Returns the type of a golden model's weights, and the greatest deviation of an embedding. Devices round the inputs
/// of products with weights in bfloat16.
fn type_of(dir: &Path) -> (WeightType, f32) {
    match fs::read_to_string(dir.join("config.json")).unwrap().contains("bfloat16") {
        true => (WeightType::Bf16, 2e-2),
        false => (WeightType::F32, 1e-4),
    }
}

fn run<D: Encoder + Dense>(encoder: &mut AudioEncoder<D>, device: &mut D, clips: &[Mel]) -> Vec<f32> {
    let mut out = Vec::new();
    encoder.run(device, clips, None, &mut out).unwrap();
    out
}

/// With `GOLDEN_DEVICE=cuda`, the encoder runs on the first GPU.
#[test]
fn the_encoder_of_qwen3_omni_agrees_and_clips_depend_on_each_other() {
    let Some(root) = std::env::var_os("GOLDEN_MODELS").map(PathBuf::from) else {
        eprintln!("skipped: GOLDEN_MODELS is not set");
        return;
    };
    let dir = root.join("qwen3_omni");
    if std::env::var("GOLDEN_DEVICE").is_ok_and(|device| device == "cuda") {
        let mut gpu = CudaDevice::open(0, &KernelCache::of_user()).unwrap();
        return agrees_on(&mut gpu, "a GPU", &dir);
    }
    for isa in Isa::supported() {
        agrees_on(&mut CpuDevice::new(2, isa).unwrap(), &isa.to_string(), &dir);
    }
}

/// Compares the encoder with the reference on a device.
fn agrees_on<D: Encoder + Dense>(device: &mut D, on: &str, dir: &Path) {
    let bytes = fs::read(dir.join("goldens.safetensors")).unwrap();
    let goldens = SafeTensors::deserialize(&bytes).unwrap();
    let mut encoder = encoder(dir.into(), device);
    assert!(encoder.weight_bytes() > 0);
    let mut worst = 0f32;
    for case in ["audio", "audio_short", "mixed", "audio_in_video", "tall_video"] {
        let clips = clips(&goldens, case, encoder.config.bins);
        let joint = run(&mut encoder, device, &clips);
        worst = worst.max(greatest(&joint, &floats(&goldens, &format!("{case}.audio_embeds"))));
        if let [long, short] = &clips[..] {
            let alone = [long, short].map(|clip| run(&mut encoder, device, std::slice::from_ref(clip)));
            let (of_long, of_short) = joint.split_at(alone[0].len());
            // The longer clip has a chunk of the full length, so it is the same beside any other.
            assert!(of_long == alone[0], "{case} on {on}");
            assert!(greatest(of_short, &alone[1]) > 1e-3, "{case} on {on}: the padding has no effect");
        }
    }
    eprintln!("qwen3_omni, audio encoder on {on}: greatest |Δ| {worst:.2e}");
    assert!(worst < type_of(dir).1, "on {on}: {worst}");
    let none = encoder.run(device, &[], None, &mut Vec::new());
    assert!(none.unwrap_err().to_string().contains("clips without a frame"));
}

#[test]
fn a_chunk_of_a_hundred_frames_is_thirteen_tokens() {
    for (frames, expected) in
        [(0, 0), (1, 1), (8, 1), (9, 2), (45, 6), (61, 8), (100, 13), (101, 14), (237, 31)]
    {
        assert_eq!(tokens(frames), expected, "{frames} frames");
    }
}

#[test]
fn windows_are_as_long_as_the_chunks_of_the_longest_clip_and_end_with_their_clip() {
    let Division { chunks, longest, windows } = Division::new(&[250, 45], 2);
    assert_eq!((chunks, longest), (vec![100, 100, 50, 45], 100));
    assert_eq!(windows, [0..26, 26..33, 33..39]);
    let Division { longest, windows, .. } = Division::new(&[45, 61], 1);
    assert_eq!((longest, windows), (61, vec![0..6, 6..14]));
}

#[test]
fn keys_that_do_not_fit_together_are_refused_by_name() {
    let refusal = |key: &str, value: serde_json::Value| {
        let mut config = json!({"output_dim": 64});
        config[key] = value;
        let file = ConfigFile::of_value(config);
        let read = AudioConfig::read(&file.keys(), 64, WeightType::F32);
        read.err().map_or_else(String::new, |error| error.to_string())
    };
    assert_eq!(refusal("n_window", json!(50)), "");
    for (key, value) in [
        ("n_window", json!(100)),
        ("n_window_infer", json!(99)),
        ("d_model", json!(1281)),
        ("d_model", json!(2)),
        ("encoder_attention_heads", json!(7)),
        ("output_dim", json!(63)),
        ("activation_function", json!("relu")),
        ("num_mel_bins", json!(1_000_000)),
        ("downsample_hidden_size", json!(0)),
        ("encoder_layers", json!(5000)),
    ] {
        let problem = refusal(key, value.clone());
        assert!(problem.contains(key), "{key} as {value}: {problem:?}");
    }
}

/// Frames are those of transformers, for a clip alone and beside another one.
#[test]
fn log_mel_frames_agree() {
    let Some(root) = std::env::var_os("GOLDEN_MODELS").map(PathBuf::from) else {
        eprintln!("skipped: GOLDEN_MODELS is not set");
        return;
    };
    let bytes = fs::read(root.join("preprocess/goldens.safetensors")).unwrap();
    let goldens = SafeTensors::deserialize(&bytes).unwrap();
    let waves = ["clip0.wave", "clip1.wave"].map(|name| floats(&goldens, name));
    let filters = MelFilters::new(128);
    let mut worst = 0f32;
    for (name, waves) in [("clip0", &waves[..1]), ("clip1", &waves[1..]), ("batch", &waves)] {
        let waves: Vec<&[f32]> = waves.iter().map(Vec::as_slice).collect();
        let clips = filters.frames(&waves).unwrap();
        let expected = floats(&goldens, &format!("{name}.mel"));
        let frames = integers(&goldens, &format!("{name}.frames"));
        let width = expected.len() / 128 / frames.len();
        assert_eq!(clips.iter().map(|clip| clip.frames).collect::<Vec<_>>(), frames, "{name}");
        for (clip, expected) in clips.iter().zip(expected.chunks_exact(128 * width)) {
            for (bin, expected) in clip.values.chunks_exact(clip.frames).zip(expected.chunks_exact(width)) {
                worst = worst.max(greatest(bin, &expected[..clip.frames]));
            }
        }
    }
    eprintln!("log-mel frames: greatest |Δ| {worst:.2e}");
    assert!(worst < 1e-4, "{worst}");
    assert!(filters.frames(&[&[0.0; 200]]).is_none() && filters.frames(&[]).is_none());
    let silence = filters.frames(&[&[0.0; 800]]).unwrap();
    assert_eq!(silence[0].frames, 5);
    assert!(silence[0].values.iter().all(|value| *value == -1.5));
}

#[test]
fn the_transform_by_factors_is_the_transform() {
    for length in [1, 2, 12, 25, 400] {
        let input: Vec<f64> =
            (0..length).map(|index| ((index * index * 7 + index) % 31) as f64 - 15.0).collect();
        let found = fourier::Fourier::new(length).run(&input);
        for (bin, [real, imaginary]) in found.into_iter().enumerate() {
            let angle = |index: usize| -std::f64::consts::TAU * (index * bin % length) as f64 / length as f64;
            let term = |index: usize| [angle(index).cos() * input[index], angle(index).sin() * input[index]];
            let sum = (0..length).map(term).fold([0.0; 2], |sum, term| [sum[0] + term[0], sum[1] + term[1]]);
            assert!((real - sum[0]).abs() < 1e-9 && (imaginary - sum[1]).abs() < 1e-9, "{length}, {bin}");
        }
    }
}
