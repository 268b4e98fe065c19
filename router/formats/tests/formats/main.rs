//! All formats: what they make of outputs, of any pieces of them, and of bad ones.

mod cases;
mod hostile;
mod samples;
mod splits;
mod support;
