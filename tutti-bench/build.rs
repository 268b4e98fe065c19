//! Passes the commit that the generator is built from to the code that makes reports.

use std::process::Command;

fn main() {
    println!("cargo:rustc-env=TUTTI_BENCH_COMMIT={}", git(&["rev-parse", "--short=12", "HEAD"]));
    // git appends to the log of HEAD at each commit, so Cargo watches this file. Without git, nothing is watched and
    // the commit is unknown.
    let log = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"]);
    if log != "unknown" {
        println!("cargo:rerun-if-changed={log}");
    }
    println!("cargo:rerun-if-changed=build.rs");
}

fn git(arguments: &[&str]) -> String {
    let output = Command::new("git").args(arguments).output();
    match output {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        _ => "unknown".to_owned(),
    }
}
