//! The worker process: one per GPU or CPU rank.
