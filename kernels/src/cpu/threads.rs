//! The device's threads and the cores that they run on.

pub(super) mod cores;
pub(super) mod pool;

pub use cores::Cores;
pub(in crate::cpu) use pool::ThreadPool;
