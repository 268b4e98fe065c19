//! The ranks of a TP group in lockstep: the leader decides, the others apply.
//!
//! [`Leader`] is a model whose every operation is first handed to the other ranks as a numbered, complete plan, then run
//! by the leader itself; the engine above it does not know. [`follow`] runs the plans of another rank. A plan says all
//! that a forward needs (tokens, positions, rows, block tables), so that the other ranks keep nothing of any request:
//! a removal is a page that a later plan gives to somebody else, and there is nothing on which ranks could differ.
//!
//! Plans travel on a group of their own beside the one that the device computes with, so that the next plan is on its
//! way while this one runs. What one rank refuses all refuse at the same place, since all check the same plan; whoever
//! fails alone ends, and the others notice in the next collective.

mod follower;
mod leader;
mod plan;

pub use self::{follower::follow, leader::Leader};
