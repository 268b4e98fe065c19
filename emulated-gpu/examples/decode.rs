#![allow(clippy::print_stdout)]
//! Decodes PTX files. Prints what each kernel needs, or why the emulator cannot run it.
//!
//! `cargo run -p tutti-emulated-gpu --example decode -- FILE.ptx…`

use std::process::ExitCode;
use tutti_emulated_gpu::Module;

fn main() -> ExitCode {
    let mut failed = false;
    for path in std::env::args().skip(1) {
        let module = std::fs::read_to_string(&path)
            .map_err(|e| e.to_string())
            .and_then(|text| Module::decode(&text).map_err(|e| e.to_string()));
        match module {
            Ok(module) => {
                for kernel in module.kernels.values() {
                    let (shared, local) = (kernel.static_shared_bytes, kernel.local_bytes);
                    match &kernel.error {
                        None => println!("{path}: {}: {shared} bytes shared, {local} local", kernel.name),
                        Some(error) => {
                            failed = true;
                            println!("{path}: {}: {error}", kernel.name);
                        }
                    }
                }
            }
            Err(error) => {
                failed = true;
                println!("{path}: {error}");
            }
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
