//! All formats: what they make of outputs, of any pieces of them, and of bad ones.

mod cases;
mod hostile;
mod malformed;
mod samples;
mod splits;
mod support;
