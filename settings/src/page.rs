//! The page `docs/configuration.md`.
