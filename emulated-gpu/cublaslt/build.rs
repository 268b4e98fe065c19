//! Gives the library the soname of the real one, by which the loader finds it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcublasLt.so.13");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
