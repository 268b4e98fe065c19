//! The allocator of the executables: jemalloc without caches of threads.
//!
//! glibc's allocator keeps a page as long as anything is on it, and what a busy time leaves behind is spread over many
//! pages. jemalloc puts blocks of one size together. Caches of threads would spread them again.

use std::ffi::c_char;

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// The pointer from which jemalloc reads its options.
#[repr(transparent)]
pub struct Options(*const c_char);

// SAFETY: the text is constant, so threads may read it at once.
unsafe impl Sync for Options {}

/// Options of jemalloc (`opt.*` of its manual). `_RJEM_MALLOC_CONF` wins.
// SAFETY: jemalloc declares this name as a pointer to text that ends with 0, and defines it weakly, so that a program
// replaces it.
#[unsafe(export_name = "_rjem_malloc_conf")]
pub static OPTIONS: Options =
    Options(c"tcache:false,background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0".as_ptr());
