//! Chooses the instruction paths that are compiled. Each makes a third or a quarter of the crate's code, which takes
//! minutes to compile.
//!
//! A release build has all paths. A debug build runs where it is built, so it has those of this machine. The variable
//! `KERNELS_PATHS` overrides that: `all`, `host`, or `dots`, which has only the code that `tests/disassembly` reads.

#![allow(clippy::print_stdout, reason = "Cargo reads it")]

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=KERNELS_PATHS");
    println!("cargo::rustc-check-cfg=cfg(path, values(\"portable\", \"avx2\", \"avx512\", \"dots\"))");
    let is = |name: &str, value: &str| env::var(name).is_ok_and(|found| found == value);
    let built_here = is("TARGET", &env::var("HOST").unwrap_or_default());
    let default = if is("PROFILE", "debug") && built_here { "host" } else { "all" };
    let chosen = env::var("KERNELS_PATHS").unwrap_or(default.to_owned());
    let paths: &[&str] = match (env::var("CARGO_CFG_TARGET_ARCH").as_deref(), chosen.as_str()) {
        (Ok("x86_64"), "dots") => &["dots"],
        (Ok("x86_64"), "host") if !has_avx512() => &["portable", "avx2"],
        (Ok("x86_64"), "all" | "host") => &["portable", "avx2", "avx512", "dots"],
        (_, "all" | "host") => &["portable"],
        _ => panic!("KERNELS_PATHS is {chosen:?}, but must be all or host or, on x86-64, dots"),
    };
    for path in paths {
        println!("cargo::rustc-cfg=path=\"{path}\"");
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx512() -> bool {
    false
}
