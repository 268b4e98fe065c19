//! The ranks of a TP group in lockstep: the leader decides, the others apply.
//!
//! [`Leader`] is a [`Model`](crate::Model) that sends each operation to the other ranks as a numbered, complete plan
//! and then runs it itself; the engine does not see the group. [`follow`] runs the plans on each other rank. A plan
//! holds everything that a forward needs (tokens, positions, rows, block tables), so the other ranks keep no state of
//! any request, and ranks cannot disagree. To remove a request, the leader gives its pages to another in a later plan.
//!
//! Plans travel on a separate [`Collective`](tutti_kernels::collective::Collective), so the next plan arrives while the
//! device computes this one. All ranks check the same plan and thus refuse it alike. A rank that fails alone ends, and
//! the others notice in the next collective.

mod follower;
mod leader;
mod plan;

pub use self::{follower::follow, leader::Leader};
