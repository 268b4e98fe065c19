//! Keeps the ranks of a TP group in lockstep: the leader decides which operations run, and the other ranks run the same
//! operations.
//!
//! [`Leader`] is a [`Model`](crate::Model) that sends each operation to the other ranks as a numbered, complete plan
//! and then runs the operation on its own shard. The engine does not see the group. [`follow`] runs the plans on each
//! other rank. A plan holds everything that a forward pass needs: tokens, positions, rows, slot copies, and the pages
//! that the rows' block tables have gained. The other ranks keep one block table per slot and no other state of a
//! request. All ranks change these tables by the same plans, so the tables are always equal. No plan says that a
//! request has ended. Instead, a later plan gives the request's slot and pages to another request, and says how many
//! leading pages the slot's table keeps.
//!
//! If two groups have the same number of ranks, each rank sends its own share of a request's pages to the rank with the
//! same index in the other group, through its [connector](tutti_transfer::Connector). The leader's plans say which runs
//! of pages each rank reads and writes, and when.
//!
//! Plans travel on a separate [`Collective`](tutti_kernels::collective::Collective), so the next plan can arrive while
//! the device computes the current one. All ranks check the same plan, so all ranks refuse it or no rank does. If a
//! single rank fails, its process ends, and the other ranks notice that in their next collective operation.

mod follower;
mod leader;
mod logits;
mod plan;
mod tables;

pub use self::{follower::follow, leader::Leader};
