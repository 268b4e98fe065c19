//! Compares instruction paths on a whole model. Paths that round in the same way give equal bits, and others differ by
//! at most a bound.

use std::io::Write;

use crate::common::{PAGES, bits, config, generate, prompt, try_load_as, write_config};
use crate::cpu_paths::testable;
use serde_json::json;
use tutti_kernels::TokenScore;
use tutti_kernels::cpu::{CpuDevice, Isa};
use tutti_models::{LoadFormat::Dummy, Quantize};

const OUTPUT: usize = 4;

/// For each prompt, the output tokens and the scores of the prompt.
type Runs = Vec<(Vec<u32>, Vec<TokenScore>)>;

/// Returns the greatest difference between two logprobs of the same token.
fn greatest_difference(a: &Runs, b: &Runs) -> f32 {
    let logprobs = |runs: &Runs| -> Vec<f32> {
        runs.iter().flat_map(|(_, scores)| scores.iter().map(|score| score.logprob)).collect()
    };
    logprobs(a).iter().zip(&logprobs(b)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Runs a model on all instruction paths that the machine has. For a path in `close`, logprobs differ from those of
/// AVX2 by at most the path's bound. All other paths have the bits of AVX2. A bound is a multiple of the measured
/// difference. It is larger if an activation may round to another int8 value.
fn compare(what: &str, changes: &serde_json::Value, quantize: Quantize, close: &[(Isa, f32)]) {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), &config(changes));
    let prompts = [1, 9, 70].map(prompt);
    let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    let run = |isa: Isa| {
        let device = CpuDevice::new(1, isa).unwrap();
        let mut model = try_load_as(device, dir.path(), Dummy, quantize).unwrap();
        model.allocate_planes(PAGES, 1).unwrap();
        generate(&mut *model, &prompts, 32, OUTPUT)
    };
    // Writes to stderr directly, because the test harness hides printed output unless the test fails.
    let say = |line: String| std::io::stderr().write_all(line.as_bytes()).unwrap();
    if !Isa::Avx2.available() {
        return say(format!("{what}: SKIPPED: this machine has no {}\n", Isa::Avx2));
    }
    say(format!("{what}: the best path here is {}\n", Isa::detect()));
    let reference = run(Isa::Avx2);
    for isa in testable(what).into_iter().filter(|&isa| isa != Isa::Avx2) {
        let got = run(isa);
        if let Some((_, bound)) = close.iter().find(|(close, _)| *close == isa) {
            let difference = greatest_difference(&got, &reference);
            say(format!("{what}: {isa} is within {difference:.1e} of {}\n", Isa::Avx2));
            assert!(
                difference <= *bound,
                "{what}: {isa} is {difference:e} from {}, at most {bound:e}",
                Isa::Avx2
            );
        } else {
            assert!(bits(&got) == bits(&reference), "{what}: {isa} has other bits than {}", Isa::Avx2);
            say(format!("{what}: {isa} has the bits of {}\n", Isa::Avx2));
        }
    }
}

#[test]
fn f32_weights() {
    compare("f32", &json!({}), Quantize::None, &[(Isa::Portable, 1e-5)]);
}

/// Paths with dot products of bfloat16 round activations to 8 bits of mantissa, and other paths use block floating
/// point of 13 bits. Rounding activations to bfloat16 on AVX2 would cause the same difference. The portable path
/// multiplies like AVX2 and differs only in other operations.
#[test]
fn bf16_weights() {
    let changes = json!({"torch_dtype": "bfloat16", "tie_word_embeddings": true});
    compare("bf16", &changes, Quantize::None, &[(Isa::Portable, 0.02), (Isa::Avx512Bf16, 0.25)]);
}

/// On paths with dot products of bfloat16, attention over pages of bfloat16 rounds queries and softmax weights to
/// bfloat16. Some activations then round to another int8 value. On the portable path, no activation does.
#[test]
fn int8_weights() {
    let changes = json!({"torch_dtype": "bfloat16", "hidden_size": 200, "intermediate_size": 300});
    compare("int8", &changes, Quantize::Int8, &[(Isa::Portable, 5e-3), (Isa::Avx512Bf16, 0.06)]);
}

/// Matrix products in int8 have the same bits on all paths. With pages of f32, attention computes in f32.
#[test]
fn int8_weights_with_pages_of_f32() {
    let changes = json!({"hidden_size": 200, "intermediate_size": 300});
    compare("int8, f32 pages", &changes, Quantize::Int8, &[(Isa::Portable, 5e-3)]);
}
