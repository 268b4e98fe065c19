//! Gives this library the soname of NVIDIA's library, so that programs load this one instead. Also prevents unloading,
//! because this library runs threads.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
