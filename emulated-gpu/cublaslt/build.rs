//! Gives this library the soname of NVIDIA's library, so that programs load this one instead.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcublasLt.so.13");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
