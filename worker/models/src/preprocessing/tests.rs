use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;
use tutti_kernels::WeightType;

use super::*;

fn config(value: Value) -> ConfigFile {
    ConfigFile::of_value(value)
}

fn vision() -> VisionConfig {
    VisionConfig::read(&config(json!({"out_hidden_size": 64})).keys(), true, 64, WeightType::F32).unwrap()
}

fn audio() -> AudioConfig {
    AudioConfig::read(&config(json!({"output_dim": 64})).keys(), 64, WeightType::F32).unwrap()
}

/// The keys of the published Qwen3-Omni.
fn published() -> Value {
    json!({
        "chunk_length": 300, "dither": 0.0, "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128, "hop_length": 160, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "image_processor_type": "Qwen2VLImageProcessor", "max_pixels": 12_845_056, "merge_size": 2,
        "min_pixels": 3136, "n_fft": 400, "n_samples": 4_800_000, "patch_size": 16, "sampling_rate": 16_000,
        "temporal_patch_size": 2,
    })
}

fn folder(files: &[(&str, Value)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    files.iter().for_each(|(name, value)| fs::write(dir.path().join(name), value.to_string()).unwrap());
    dir
}

#[test]
fn a_folder_without_files_prepares_nothing() {
    let text = json!({"processor_class": "Qwen3Processor"});
    for dir in [folder(&[]), folder(&[("processor_config.json", text)])] {
        assert!(PreprocessorFiles::read(dir.path()).unwrap().is_none());
    }
}

#[test]
fn one_file_prepares_all_media_unless_videos_have_their_own() {
    let video = json!({"size": {"shortest_edge": 4096, "longest_edge": 25_165_824}, "patch_size": 16,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "cap_pixels_per_frame": false,
        "merge_size": 2, "temporal_patch_size": 2, "video_processor_type": "Qwen3VLVideoProcessor"});
    let names = [PreprocessorFiles::NAME, "video_preprocessor_config.json"];
    let one = folder(&[(names[0], published())]);
    let two = folder(&[(names[0], published()), (names[1], video.clone())]);
    let joint =
        json!({"image_processor": published(), "video_processor": video, "feature_extractor": published()});
    let joint = folder(&[("processor_config.json", joint)]);
    for (dir, longest) in [(one, 12_845_056), (two, 25_165_824), (joint, 25_165_824)] {
        let files = PreprocessorFiles::read(dir.path()).unwrap().unwrap();
        let images = files.images(dir.path(), &vision()).unwrap();
        assert_eq!(images.limits, PixelLimits { shortest_edge: 3136, longest_edge: 12_845_056 });
        assert_eq!(images.channels, [Channel { mean: 0.5, deviation: 0.5 }; 3]);
        assert_eq!(files.videos(dir.path(), &vision()).unwrap().limits.longest_edge, longest);
        files.check_sound(dir.path(), &audio()).unwrap();
    }
}

/// Transformers 5.23 read files in this order.
#[test]
fn the_joint_file_and_the_older_keys_come_first() {
    let mut other = published();
    other["image_mean"] = json!([0.25, 0.25, 0.25]);
    other["size"] = json!({"shortest_edge": 4096, "longest_edge": 65_536});
    let names = [PreprocessorFiles::NAME, "processor_config.json"];
    let dir = folder(&[(names[0], published()), (names[1], json!({"image_processor": other}))]);
    let files = PreprocessorFiles::read(dir.path()).unwrap().unwrap();
    let images = files.images(dir.path(), &vision()).unwrap();
    assert_eq!(images.limits, PixelLimits { shortest_edge: 3136, longest_edge: 12_845_056 });
    assert_eq!(images.channels[0].mean, 0.25);
}

#[test]
fn values_that_need_another_computation_are_refused_by_key() {
    for (key, value, words) in [
        ("image_processor_type", json!("CLIPImageProcessor"), "must be one of Qwen2VLImageProcessor"),
        ("patch_size", json!(14), "is 14, but the vision_config has 16"),
        ("merge_size", Value::Null, "is missing"),
        ("temporal_patch_size", json!(1), "is 1, but"),
        ("do_resize", json!(false), "false is not supported"),
        ("resample", json!(2), "must be 3, not 2"),
        ("rescale_factor", json!(1.0), "must be a number from"),
        ("max_pixels", json!(1000), "hold no size"),
        ("min_pixels", Value::Null, "is missing"),
        ("image_mean", json!([0.5]), "has 1 entries"),
        ("image_mean", Value::Null, "is missing"),
        ("cap_pixels_per_frame", json!(true), "true is not supported"),
        ("image_std", json!([0.5, 0.5, 0.0]), "must be a list"),
    ] {
        let mut changed = published();
        changed[key] = value;
        let dir = folder(&[(PreprocessorFiles::NAME, changed)]);
        let files = PreprocessorFiles::read(dir.path()).unwrap().unwrap();
        let error = files.images(dir.path(), &vision()).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains(PreprocessorFiles::NAME), "{key}: {error}");
    }
    for (key, value, words) in [
        ("feature_extractor_type", json!("EncodecFeatureExtractor"), "must be \"WhisperFeatureExtractor\""),
        ("sampling_rate", json!(24_000), "must be 16000, not 24000"),
        ("hop_length", json!(320), "must be 160"),
        ("n_fft", json!(512), "must be 400"),
        ("feature_size", json!(80), "is 80, but num_mel_bins of audio_config is 128"),
        ("dither", json!(0.1), "must be a number"),
    ] {
        let mut changed = published();
        changed[key] = value;
        let dir = folder(&[(PreprocessorFiles::NAME, changed)]);
        let files = PreprocessorFiles::read(dir.path()).unwrap().unwrap();
        let error = files.check_sound(dir.path(), &audio()).unwrap_err().to_string();
        assert!(error.contains(key) && error.contains(words), "{key}: {error}");
    }
}
