//! Output that follows a JSON schema, a regular expression, a list of choices, a Lark grammar or structural tags.
//!
//! ```text
//! Constraint ──▶ Environment::check      before a request is accepted: bounds, strict rules, a compilation, a probe
//!     │
//!     └────────▶ Environment::compile ──▶ Matcher: mask, sample, commit, mask, … until nothing can follow
//! ```
//!
//! - `constraint`: a request's constraint as plain data, and its canonical form, the key of all caches.
//! - `message`: the constraint as requests carry it.
//! - `vocabulary`: the bytes of every token and the tokens that are no text, read from `tokenizer.json`.
//! - `environment`: a vocabulary prepared for masks. A process builds it once, at its first constrained request.
//! - `schema`: JSON schemas: bounds, keywords that cannot be enforced, strict mode.
//! - `text_bounds`: the bounds of regular expressions, grammars and lists, which hold before anything is parsed.
//! - `grammar`: the constraint as input of `llguidance`, with the thinking block in front of the answer.
//! - `check`: the whole check, under one time limit.
//! - `matcher`: the state of one sequence.
//! - `cache`: base matchers by content, so that requests with equal constraints share a compilation.
//!
//! # Rules for an engine
//!
//! - A mask is a function of the constraint and of the committed tokens. Limits count work and not time, so a slow
//!   machine never changes a mask; what exceeds a limit ends its request with an error, and no other request.
//! - Only the row of a sequence that is not void is committed, and in order. [`BaseMatchers::replayed`] rebuilds the
//!   state from the generated tokens, and does not fail where the first matcher did not.
//! - Matchers share nothing that changes. A process bounds the sum of [`Matcher::bytes`] over its requests, and the
//!   time of a mask by a [`Canceller`].
//! - The grammar goes before `min_tokens`: `min_tokens` forbids end tokens, and where [`Allowed::only_ends`] says that
//!   nothing else may follow, the request ends with `stop` although it is short.
//! - [`Progress::Finished`] ends a request at once with `stop`, and no end token is sampled.
//! - `max_tokens` inside the text ends a request with `length`, and stop strings apply inside the text.
//!
//! # Tokens that are forced
//!
//! Where the grammar allows one text only, its bytes are forced, but not its tokens: a model may divide the text as it
//! likes. Appending forced tokens needs the canonical tokens of a text, which [`toktrie`](llguidance::toktrie) asks of
//! the tokenizer. The environment has no tokenizer and says that it is not canonical, so the library never forces
//! tokens.

mod cache;
mod check;
mod constraint;
mod environment;
mod error;
mod grammar;
mod limits;
mod matcher;
mod message;
mod schema;
mod text_bounds;
mod thread;
mod vocabulary;

pub use self::{
    cache::{BaseMatchers, CacheCounts},
    constraint::{Canonical, Constraint, Kind, Strictness, StructuralTag, Thinking, Whitespace},
    environment::Environment,
    error::{Cause, ConstraintError},
    grammar::with_bounded_whitespace,
    limits::{CHECK_TIME, MAX_BYTES as MAX_GRAMMAR_BYTES},
    matcher::{Allowed, Canceller, Matcher, Progress},
    schema::check as check_schema,
    vocabulary::{Declared, Token, Vocabulary},
};
