//! `libnccl.so.2` over the emulated driver: collectives between processes of one machine.
//!
//! ```text
//! api (C functions) --> group --> operation (in the stream's order) --> communicator (peers, messages, errors)
//!                                                                             \--> rendezvous, id
//! ```
//!
//! Every rank has a socket to every other rank. In a collective, a rank sends the data that the other ranks need. It
//! combines the data that it receives in the order of ranks, so a sum has the same bits on every rank and in every run.
//! Sums of f16 and bf16 round after each rank, as NCCL's rings do.
//!
//! As with NCCL, an operation that one rank does not join never ends: the streams of the others wait until the
//! communicator is aborted. If a rank dies, the others get an asynchronous error. `EMULATED_NCCL_NOTICE=0` turns this
//! error off, because real ranks that communicate through shared GPU memory do not notice a dead rank. Unlike NCCL, the
//! library reports an error if ranks call different collectives, or the same collective with different arguments.

mod api;
mod communicator;
mod group;
mod id;
mod operation;
mod rendezvous;
mod result;
mod value;
