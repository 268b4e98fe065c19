//! Keeps the ranks of a TP group in lockstep: the leader decides what to run, and the other ranks run the same.
//!
//! [`Leader`] is a [`Model`](crate::Model) that sends each operation to the other ranks as a numbered, complete plan
//! and then runs the operation itself; the engine does not see the group. [`follow`] runs the plans on each other rank.
//! A plan holds everything that a forward pass needs: tokens, positions, rows, slot copies, and the pages that the
//! rows' block tables have gained. The other ranks keep one block table per slot and no other state of any request. All
//! ranks change these tables by the same plans, so they cannot disagree. No plan says that a request has ended.
//! Instead, a later plan uses the request's slot and pages for another request, and says how many leading pages the
//! slot's table keeps.
//!
//! If two groups have the same number of ranks, a request's pages pass between them rank by rank. Each rank sends and
//! receives its own share through its [connector](tutti_transfer::Connector). The leader's plans say which runs are
//! read and written, and when.
//!
//! Plans travel on a separate [`Collective`](tutti_kernels::collective::Collective), so the next plan can arrive while
//! the device computes the current one. All ranks check the same plan, so either all of them refuse it or none does. If
//! one rank alone fails, its process ends, and the other ranks notice that in their next collective operation.

mod follower;
mod leader;
mod logits;
mod plan;
mod tables;

pub use self::{follower::follow, leader::Leader};
