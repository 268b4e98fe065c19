//! Routes requests to workers; owns their life, and every request's state.
