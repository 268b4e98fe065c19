//! The number of files and sockets that the process may have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors that are kept for files, pipes and outgoing connections.
const RESERVED: u64 = 256;

/// Raises the limit on open files as far as the system permits. Called once, at the start of a process that serves
/// connections. The default is often 1024, because `select` supports no more.
pub fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        tracing::warn!(%error, ?current, ?maximum, "cannot raise the limit on open files");
    }
}

/// Maximum number of descriptors for the connections of one listener. This is half of the descriptors that are not
/// reserved, so that a flood on one listener leaves the other half to other listeners.
pub fn for_connections() -> usize {
    match getrlimit(Resource::Nofile).current {
        Some(limit) => (limit.saturating_sub(RESERVED).max(2) / 2) as usize,
        None => usize::MAX,
    }
}
