//! Model families, written once against the device seam.
