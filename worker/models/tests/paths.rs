//! Every instruction path computes the same model: bit by bit where all of it is rounded alike, closely elsewhere.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use std::io::Write;

use common::{PAGES, bits, config, generate, prompt, try_load_as, write_config};
use serde_json::json;
use tutti_kernels::TokenScore;
use tutti_kernels::cpu::{CpuDevice, Isa};
use tutti_models::{LoadFormat::Dummy, Quantize};

const OUTPUT: usize = 4;

/// What became of each prompt.
type Runs = Vec<(Vec<u32>, Vec<TokenScore>)>;

/// The greatest difference of two logprobs of the same token.
fn apart(a: &Runs, b: &Runs) -> f32 {
    let logprobs = |runs: &Runs| -> Vec<f32> {
        runs.iter().flat_map(|(_, scores)| scores.iter().map(|score| score.logprob)).collect()
    };
    logprobs(a).iter().zip(&logprobs(b)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Runs a model on all paths that are there. `same` have the bits of AVX2, the others stay within `bound` of its
/// logprobs: some times what was measured of the portable path, whose differences an activation that falls to the other
/// side of a step, of bfloat16 or of int8, makes larger.
fn compare(what: &str, changes: &serde_json::Value, quantize: Quantize, same: &[Isa], bound: f32) {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), &config(changes));
    let prompts = [1, 9, 70].map(prompt);
    let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    let run = |isa: Isa| {
        let device = CpuDevice::new(1, isa).unwrap();
        let mut model = try_load_as(device, dir.path(), Dummy, quantize).unwrap();
        model.allocate_pages(PAGES).unwrap();
        generate(&mut *model, &prompts, 32, OUTPUT)
    };
    // Past the harness, which keeps what a test prints for its failure.
    let say = |line: String| std::io::stderr().write_all(line.as_bytes()).unwrap();
    if !Isa::Avx2.available() {
        return say(format!("{what}: SKIPPED: this machine has no {}\n", Isa::Avx2));
    }
    say(format!("{what}: the best path here is {}\n", Isa::detect()));
    let reference = run(Isa::Avx2);
    for isa in Isa::ALL.into_iter().filter(|&isa| isa != Isa::Avx2) {
        if !isa.available() {
            say(format!("{what}: SKIPPED on {isa}: this machine does not have it\n"));
            continue;
        }
        let got = run(isa);
        if same.contains(&isa) {
            assert!(bits(&got) == bits(&reference), "{what}: {isa} has other bits than {}", Isa::Avx2);
            say(format!("{what}: {isa} has the bits of {}\n", Isa::Avx2));
        } else {
            let apart = apart(&got, &reference);
            say(format!("{what}: {isa} is within {apart:.1e} of {}\n", Isa::Avx2));
            assert!(apart <= bound, "{what}: {isa} is {apart:e} from {}, at most {bound:e}", Isa::Avx2);
        }
    }
}

const FUSED: [Isa; 3] = [Isa::Avx512, Isa::Avx512Vnni, Isa::Avx512Bf16];

/// Measured: 9.5e-7.
#[test]
fn f32_weights() {
    compare("f32", &json!({}), Quantize::None, &FUSED, 1e-5);
}

/// The dot product of bfloat16 takes denormals for zeros, which may show. Measured: 0.018, and nothing with that product
/// in emulation.
#[test]
fn bf16_weights() {
    let changes = json!({"torch_dtype": "bfloat16", "tie_word_embeddings": true});
    compare("bf16", &changes, Quantize::None, &FUSED[..2], 0.04);
}

/// Measured: 4.8e-7, no step having moved.
#[test]
fn int8_weights() {
    let changes = json!({"torch_dtype": "bfloat16", "hidden_size": 200, "intermediate_size": 300});
    compare("int8", &changes, Quantize::Int8, &FUSED, 5e-3);
}
