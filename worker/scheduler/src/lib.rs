//! The micro-scheduler: pure, no I/O, no clock of its own, no device.
