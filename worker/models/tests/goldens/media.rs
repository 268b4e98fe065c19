//! Prompts with sound, pictures and frames, whose embeddings, features and positions are those of the reference.

use std::{fs, path::PathBuf};

use safetensors::SafeTensors;
use tutti_kernels::cpu::Isa;

use crate::{
    common::{
        Media, bits, generate_with,
        goldens::{Case, bound},
    },
    load, on_gpu,
};

/// Ids of the placeholders in the goldens' prompts, and the names of what is embedded there.
const KINDS: [(u32, &str); 3] = [(300, "audio"), (301, "image"), (302, "video")];

fn floats(goldens: &SafeTensors<'_>, name: &str) -> Option<(Vec<f32>, usize)> {
    let tensor = goldens.tensor(name).ok()?;
    let values = tensor.data().as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect();
    Some((values, *tensor.shape().last().unwrap()))
}

/// Returns the rows of a kind of media: the embedding of each token, and its features for the first layers.
fn rows(goldens: &SafeTensors<'_>, case: &str, kind: &str) -> Option<(Vec<f32>, usize)> {
    let (embeddings, hidden) = floats(goldens, &format!("{case}.{kind}_embeds"))?;
    let features = (0..).map_while(|level| floats(goldens, &format!("{case}.{kind}_deepstack.{level}")));
    let parts: Vec<Vec<f32>> = [embeddings].into_iter().chain(features.map(|(values, _)| values)).collect();
    let row = |row: usize| parts.iter().flat_map(move |part| part[row * hidden..][..hidden].to_vec());
    Some(((0..parts[0].len() / hidden).flat_map(row).collect(), hidden * parts.len()))
}

fn media(goldens: &SafeTensors<'_>, case: &str, prompt: &[u32]) -> Media {
    let (positions, tokens) = floats(goldens, &format!("{case}.position_ids")).unwrap();
    let (delta, _) = floats(goldens, &format!("{case}.rope_delta")).unwrap();
    let axes = |index: usize| [0, 1, 2].map(|axis| positions[axis * tokens + index]);
    let mut of_media = Vec::new();
    for (id, kind) in KINDS {
        let Some((values, width)) = rows(goldens, case, kind) else { continue };
        let indices = prompt.iter().enumerate().filter(|(_, token)| **token == id).map(|(index, _)| index);
        // One range per token also tests that ranges are assigned to rows one by one.
        let own = indices.zip(values.chunks_exact(width));
        of_media.extend(own.map(|(index, row)| (index..index + 1, width, row.to_vec())));
    }
    Media { positions: (0..tokens).map(axes).collect(), delta: delta[0], rows: of_media }
}

/// Compares a model with its goldens of prompts with media: logprobs and greedy tokens, in chunks that end inside of
/// items. All chunks give the same bits.
fn agrees(model: &str, cases: &[&str]) {
    let Some(root) = std::env::var_os("GOLDEN_MODELS").map(PathBuf::from) else {
        eprintln!("skipped: GOLDEN_MODELS is not set");
        return;
    };
    let dir = root.join(model);
    let bytes = fs::read(dir.join("goldens.safetensors")).unwrap();
    let goldens = SafeTensors::deserialize(&bytes).unwrap();
    // With weights in bfloat16, only the bits of chunks are compared.
    let exact = !fs::read_to_string(dir.join("config.json")).unwrap().contains("bfloat16");
    let paths = if on_gpu() { vec![None] } else { vec![Some(Isa::detect()), Some(Isa::Portable)] };
    for isa in paths {
        let on = isa.map_or("a GPU".to_owned(), |isa| isa.to_string());
        let mut loaded = load(&dir, isa);
        let mut worst = 0.0f64;
        for case in cases {
            let media = media(&goldens, case, &Case::named(&goldens, case).prompt);
            let case_name = case;
            let case = Case::named(&goldens, case);
            let mut run =
                |chunk| generate_with(&mut *loaded, &[&case.prompt], &[&media], chunk, case.greedy.len());
            let whole = run(usize::MAX);
            for chunk in [1, 5, 16] {
                assert!(
                    bits(&run(chunk)) == bits(&whole),
                    "{case_name} on {on}: chunks of {chunk} change a bit"
                );
            }
            let (output, scores) = &whole[0];
            for (i, score) in scores.iter().enumerate() {
                worst = worst.max((f64::from(score.logprob) - case.logprob(i + 1)).abs());
            }
            assert!(!exact || *output == case.greedy, "{case_name} on {on}: {output:?}");
        }
        eprintln!("{model} with media on {on}: greatest |Δ logprob| {worst:.2e}");
        assert!(!exact || worst < bound(model), "greatest deviation on {on} {worst}");
    }
}

#[test]
fn qwen3_omni() {
    agrees(
        "qwen3_omni",
        &["audio", "audio_short", "image", "video", "mixed", "audio_in_video", "tall_video"],
    );
}

#[test]
fn qwen3_vl() {
    agrees("qwen3_vl", &["image", "images_video"]);
}

#[test]
fn qwen3_vl_moe() {
    agrees("qwen3_vl_moe", &["image", "images_video"]);
}

#[test]
fn qwen3_5() {
    agrees("qwen3_5", &["image", "images_video"]);
}

#[test]
fn qwen3_5_moe() {
    agrees("qwen3_5_moe", &["image", "images_video"]);
}
