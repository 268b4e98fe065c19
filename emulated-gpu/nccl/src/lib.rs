//! `libnccl.so.2` over the emulated driver: collectives between processes of one machine.
//!
//! ```text
//! api (C functions) --> group --> operation (in the stream's order) --> communicator (peers, messages, errors)
//!                                                                             \--> rendezvous, id
//! ```
//!
//! Every rank has a socket to every other. A collective sends what the others need and combines what comes in the order
//! of ranks, so that sums are the same bits on every rank and in every run. Sums of f16 and bf16 round after each rank,
//! as NCCL's rings do.
//!
//! As with NCCL an operation that a rank does not join never ends: the stream waits until the communicator is aborted.
//! A rank that dies is an asynchronous error of the others, unless `EMULATED_NCCL_NOTICE=0` makes its death silent, as
//! between GPUs that share memory. Unlike NCCL the library finds ranks that call different collectives, or one
//! collective with different arguments.

mod api;
mod communicator;
mod group;
mod id;
mod operation;
mod rendezvous;
mod result;
mod value;
