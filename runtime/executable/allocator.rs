//! The allocator of the executables: jemalloc, with an arena per processor and no caches of threads.
//!
//! glibc's allocator keeps a page as long as anything is on it, and what a busy time leaves behind is spread over many
//! pages. jemalloc puts blocks of one size together. Caches of threads would spread them again.
//!
//! Tests count the blocks of glibc's allocator (`tests/cluster/lib/live_heap.c`), so executables with the models of
//! tests have that one.

use std::ffi::c_char;

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Options of jemalloc (`opt.*` of its manual). `_RJEM_MALLOC_CONF` wins.
const OPTIONS: &[u8] =
    b"percpu_arena:percpu,tcache:false,background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0\0";

/// What jemalloc reads the options from: a pointer to text that ends with 0.
// SAFETY: jemalloc declares this name as such a pointer, and no other symbol has it. The text is never written.
#[unsafe(export_name = "_rjem_malloc_conf")]
pub static CONFIGURATION: Option<&'static c_char> = Some(first(OPTIONS));

/// The first byte of a text.
const fn first(text: &'static [u8]) -> &'static c_char {
    // SAFETY: a byte and a C character have one layout, and the reference stays within the text, which is not empty.
    unsafe { &*text.as_ptr().cast::<c_char>() }
}
