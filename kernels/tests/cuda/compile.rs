//! Tests that all sources compile for all architectures without warnings, or for those that `CUDA_ARCHITECTURES` names,
//! separated by blanks.

use tutti_kernels::cuda::{self, SOURCES};

use crate::support::skipped;

/// One architecture of each generation since Ampere. Hopper is listed as `compute_90` and `compute_90a`, because their
/// code differs.
const ARCHITECTURES: [&str; 7] =
    ["compute_80", "compute_86", "compute_89", "compute_90", "compute_90a", "compute_100a", "compute_120a"];

#[test]
fn all_sources_compile_for_all_architectures_without_a_warning() {
    if let Err(why) = cuda::compile(&SOURCES[0], "compute_80")
        && why.contains("is missing")
    {
        return skipped("compilation", &why);
    }
    // A short run names some of them.
    let chosen = std::env::var("CUDA_ARCHITECTURES").unwrap_or(ARCHITECTURES.join(" "));
    for source in SOURCES {
        for architecture in chosen.split(' ') {
            assert!(ARCHITECTURES.contains(&architecture), "CUDA_ARCHITECTURES names {architecture:?}");
            let (ptx, log) = cuda::compile(source, architecture).unwrap();
            assert_eq!(log, "", "{} for {architecture}", source.name);
            for kernel in source.kernels {
                let name = kernel.name;
                assert!(ptx.contains(&format!(".entry {name}(")), "{name} for {architecture}");
            }
        }
    }
}

#[test]
fn an_error_of_the_compiler_names_the_architecture() {
    let error = cuda::compile(&SOURCES[0], "compute_1").unwrap_err();
    assert!(error.contains("compute_1") || error.contains("is missing"), "{error}");
}
