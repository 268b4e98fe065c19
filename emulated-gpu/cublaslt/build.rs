//! Names the library as the loader and `ldd` know the real one.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcublasLt.so.13");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
