//! Runs a step plan on a model and a device.
