//! Gives the library the soname of the real one, by which the loader finds it. Also keeps the library loaded, because
//! communicators run threads.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
