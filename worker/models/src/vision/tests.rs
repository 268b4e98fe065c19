use std::{
    ffi::OsStr,
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

use tutti_media::{SizeLimits, resize};

use super::{
    patches::{Channel, PatchSizes, patches},
    weights::{OMNI, VL},
    *,
};
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

/// Returns a golden tensor of floats; `None` if there is none of this name.
fn floats(goldens: &SafeTensors<'_>, name: &str) -> Option<Vec<f32>> {
    let data = goldens.tensor(name).ok()?.data().as_chunks::<4>().0.to_vec();
    Some(data.into_iter().map(f32::from_le_bytes).collect())
}

fn grids(goldens: &SafeTensors<'_>, name: &str) -> Vec<PatchGrid> {
    let data = goldens.tensor(name).unwrap().data().as_chunks::<8>().0.to_vec();
    let sizes: Vec<usize> = data.into_iter().map(|size| i64::from_le_bytes(size) as usize).collect();
    let grid = |&[frames, height, width]: &[usize; 3]| PatchGrid { frames, height, width };
    sizes.as_chunks().0.iter().map(grid).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Returns the type of a golden model's weights, and the greatest deviation of an embedding. Devices round the inputs
/// of products with weights in bfloat16.
fn type_of(dir: &Path) -> (WeightType, f32) {
    match fs::read_to_string(dir.join("config.json")).unwrap().contains("bfloat16") {
        true => (WeightType::Bf16, 2e-2),
        false => (WeightType::F32, 1e-4),
    }
}

/// Compares the encoder of a golden model with the reference, on each instruction path or, with `GOLDEN_DEVICE=cuda`,
/// on the first GPU: embeddings and features of all pictures and frames. Pictures that are encoded one by one give the
/// same bits.
fn agrees(model: &str, cases: &[&str], names: &VisionNames) {
    let Some(root) = std::env::var_os("GOLDEN_MODELS").map(PathBuf::from) else {
        eprintln!("skipped: GOLDEN_MODELS is not set");
        return;
    };
    let dir = root.join(model);
    if std::env::var("GOLDEN_DEVICE").is_ok_and(|device| device == "cuda") {
        let mut gpu = CudaDevice::open(0, &KernelCache::of_user()).unwrap();
        return agrees_on(&mut gpu, "a GPU", &dir, cases, names);
    }
    for isa in Isa::supported() {
        let mut device = CpuDevice::new(2, isa).unwrap();
        agrees_on(&mut device, &isa.to_string(), &dir, cases, names);
    }
}

/// Runs [`agrees`] on a device.
fn agrees_on<D: Encoder + Dense>(device: &mut D, on: &str, dir: &Path, cases: &[&str], names: &VisionNames) {
    let model = dir.file_name().and_then(OsStr::to_str).unwrap();
    let bytes = fs::read(dir.join("goldens.safetensors")).unwrap();
    let goldens = SafeTensors::deserialize(&bytes).unwrap();
    let file = ConfigFile::read(dir).unwrap();
    let keys = file.keys();
    let keys = if model == "qwen3_omni" { keys.section(ranges::THINKER_CONFIG).unwrap() } else { keys };
    let keys = keys.section(ranges::VISION_CONFIG).unwrap();
    let (dtype, bound) = type_of(dir);
    let config = VisionConfig::read(&keys, !model.starts_with("qwen3_5"), 64, dtype).unwrap();
    let mut encoder =
        VisionEncoder::load(config.clone(), names, &options(dir.into()), TOKENS, device).unwrap();
    assert!(encoder.weight_bytes() > 0);
    let (mut worst, mut compared) = (0f32, 0);
    for (case, kind, pixels) in cases
        .iter()
        .flat_map(|case| [(case, "image", "pixel_values"), (case, "video", "pixel_values_videos")])
    {
        let Some(pixels) = floats(&goldens, &format!("{case}.{pixels}")) else { continue };
        let grids = grids(&goldens, &format!("{case}.{kind}_grid_thw"));
        let mut rows = Vec::new();
        encoder.run(device, &pixels, &grids, None, &mut rows).unwrap();
        let width = config.row_width();
        for level in 0..width / config.out {
            let name = match level {
                0 => format!("{case}.{kind}_embeds"),
                level => format!("{case}.{kind}_deepstack.{}", level - 1),
            };
            let expected = floats(&goldens, &name).unwrap();
            assert_eq!(expected.len() / config.out, rows.len() / width, "{name}");
            for (row, expected) in rows.chunks_exact(width).zip(expected.chunks_exact(config.out)) {
                let found = &row[level * config.out..][..config.out];
                worst = found.iter().zip(expected).fold(worst, |worst, (a, b)| worst.max((a - b).abs()));
                compared += 1;
            }
        }
        let (mut one_by_one, mut first) = (Vec::new(), 0);
        for grid in &grids {
            let values = grid.patches() * config.pixels_of_patch();
            encoder.run(device, &pixels[first..first + values], &[*grid], None, &mut one_by_one).unwrap();
            first += values;
        }
        assert!(bits(&one_by_one) == bits(&rows), "{case}: {kind} on {on}");
    }
    eprintln!("{model}, vision encoder on {on}: greatest |Δ| {worst:.2e} of {compared} rows");
    assert!(worst < bound && compared > 0, "{model} on {on}: {worst} of {compared} rows");
}

#[test]
fn the_encoder_of_qwen3_omni_agrees() {
    agrees("qwen3_omni", &["image", "video", "mixed", "audio_in_video", "tall_video"], &OMNI);
}

#[test]
fn the_encoder_of_qwen3_vl_agrees() {
    agrees("qwen3_vl", &["image", "images_video"], &VL);
    agrees("qwen3_vl_moe", &["image", "images_video"], &VL);
}

#[test]
fn the_encoder_of_qwen3_5_agrees() {
    agrees("qwen3_5", &["image", "images_video"], &VL);
    agrees("qwen3_5_moe", &["image", "images_video"], &VL);
}

fn refusal(changes: &[(&str, serde_json::Value)]) -> String {
    let mut config = json!({"out_hidden_size": 64});
    changes.iter().for_each(|(key, value)| config[*key] = value.clone());
    let file = ConfigFile::of_value(config);
    let read = VisionConfig::read(&file.keys(), true, 64, WeightType::F32);
    read.err().map_or_else(String::new, |error| error.to_string())
}

#[test]
fn keys_that_do_not_fit_together_are_refused_by_name() {
    assert_eq!(refusal(&[]), "");
    for (key, value) in [
        ("num_heads", json!(10)),
        ("num_heads", json!(576)),
        ("out_hidden_size", json!(65)),
        ("num_position_embeddings", json!(2303)),
        ("deepstack_visual_indexes", json!([3, 27])),
        ("deepstack_visual_indexes", json!([3, 3])),
        ("in_channels", json!(4)),
        ("hidden_act", json!("silu")),
        ("patch_size", json!(0)),
        ("depth", json!(1_000_000)),
        ("spatial_merge_size", json!(256)),
    ] {
        let problem = refusal(&[(key, value.clone())]);
        assert!(problem.contains(key), "{key} as {value}: {problem:?}");
    }
}

#[test]
fn patches_are_in_the_order_of_tokens_and_a_picture_fills_their_frames() {
    let sizes = PatchSizes { patch: 1, temporal: 2, merge: 2 };
    let channels = [Channel { mean: 0.0, deviation: 1.0 / 255.0 }; 3];
    let picture: Vec<u8> = (0..8u8).flat_map(|pixel| [pixel, pixel + 50, pixel + 100]).collect();
    let (values, grid) = patches(&[&picture], [2, 4], sizes, channels).unwrap();
    assert_eq!(grid, PatchGrid { frames: 1, height: 2, width: 4 });
    let pixels = [0.0, 1.0, 4.0, 5.0, 2.0, 3.0, 6.0, 7.0];
    let expected = pixels.into_iter().flat_map(|pixel| [pixel, pixel + 50.0, pixel + 100.0].map(|x| [x; 2]));
    let rounded: Vec<f32> = values.iter().map(|value| value.round()).collect();
    assert_eq!(rounded, expected.flatten().collect::<Vec<f32>>());
    // The last frame of an odd number is repeated.
    let others = [0; 24];
    let (values, grid) = patches(&[&others, &others, &picture], [2, 4], sizes, channels).unwrap();
    assert_eq!((grid.frames, values.len()), (2, 2 * 48));
    assert!(values[..48].iter().all(|value| *value == 0.0) && values[48..50] == [0.0; 2]);
    assert_eq!(values[54].round(), 1.0);
    for (frames, size) in [(vec![], [2, 4]), (vec![&picture[..]], [2, 3]), (vec![&picture[..23]], [2, 4])] {
        assert!(patches(&frames, size, sizes, channels).is_none());
    }
}

/// Pictures are near their size, enlarged and oblong, and shrunk. Their patches have the bits of the reference.
#[test]
fn patches_of_pictures_are_those_of_transformers() {
    let Some(root) = std::env::var_os("GOLDEN_MODELS").map(PathBuf::from) else {
        eprintln!("skipped: GOLDEN_MODELS is not set");
        return;
    };
    let bytes = fs::read(root.join("preprocess/goldens.safetensors")).unwrap();
    let goldens = SafeTensors::deserialize(&bytes).unwrap();
    let sizes = PatchSizes { patch: 16, temporal: 2, merge: 2 };
    let limits = SizeLimits { factor: 32, least: 4096, most: 16_384 };
    for index in 0..3 {
        let picture = goldens.tensor(&format!("image{index}.rgb")).unwrap();
        let from = [picture.shape()[0], picture.shape()[1]];
        let to = limits.size(from).unwrap();
        let resized = resize(picture.data(), from, to).unwrap();
        let channels = [Channel { mean: 0.5, deviation: 0.5 }; 3];
        let (values, grid) = patches(&[&resized], to, sizes, channels).unwrap();
        assert_eq!(vec![grid], grids(&goldens, &format!("image{index}.grid_thw")));
        let expected = floats(&goldens, &format!("image{index}.pixel_values")).unwrap();
        assert!(bits(&values) == bits(&expected), "picture {index}");
    }
}
