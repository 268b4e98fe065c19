//! The bounds of constraints. The first group holds before anything is parsed, the second while the library works.

use std::time::Duration;

use llguidance::api::ParserLimits;

/// Maximum size in bytes of a schema, a grammar, a list of choices or structural tags, as compact JSON or text.
pub const MAX_BYTES: usize = 64 << 10;
/// Maximum size in bytes of the text of schemas, white space included, before they are parsed.
pub(crate) const MAX_TEXT_BYTES: usize = 4 * MAX_BYTES;
/// Maximum size in bytes of a regular expression, and of one `pattern` in a schema.
pub(crate) const MAX_REGEX_BYTES: usize = 8 << 10;
/// Maximum depth of a schema. The compiler recurses into schemas.
pub(crate) const MAX_DEPTH: usize = 32;
/// Maximum depth of brackets in a regular expression or a grammar. Their parsers recurse.
pub(crate) const MAX_BRACKETS: usize = 64;
/// Maximum number of schemas inside a schema, the schemas of members included.
pub(crate) const MAX_SCHEMAS: usize = 1024;
/// Maximum number of rules and terminals in a grammar. Its compiler recurses from rule to rule.
pub(crate) const MAX_RULES: usize = 1024;
/// Maximum number of values of all `enum` of a schema, and of choices.
pub(crate) const MAX_VALUES: usize = 10_000;
/// Maximum size in bytes of all values of all `enum` of a schema, and of all choices.
pub(crate) const MAX_VALUE_BYTES: usize = 48 << 10;
/// Maximum number of structural tags.
pub(crate) const MAX_TAGS: usize = 128;

/// Time limit of a whole check.
pub const CHECK_TIME: Duration = Duration::from_secs(1);
/// Number of tokens that a check matches, to meet limits that hold only while tokens are matched.
pub(crate) const PROBED_TOKENS: usize = 8;
/// Maximum number of compilations that look for the position of an error.
pub(crate) const LOCATING_COMPILATIONS: usize = 32;

/// Stack of a thread that compiles. The library recurses, and a stack overflow would end the process.
pub(crate) const STACK_BYTES: usize = 32 << 20;

/// Maximum states of a lexer, at one to two kilobytes each. Each sequence has a lexer of its own.
const MAX_LEXER_STATES: usize = 50_000;

/// Work of a lexer that one mask may cause, as a multiple of what a step may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Fuel(u64);

impl Fuel {
    /// The fuel of one step.
    pub(crate) const OF_A_STEP: Self = Self(1);
    /// The library's unit is about 0.1 microseconds.
    const UNITS_OF_A_STEP: u64 = 50_000;

    /// The fuel of as many steps as a replay has behind it, and of the next one. It is rounded up to a power of two, so
    /// that replays share compilations.
    pub(crate) fn of_a_replay(tokens: usize) -> Self {
        Self((tokens as u64 + 1).next_power_of_two())
    }
}

/// The limits of the library. All count work, so that they do not depend on the machine.
pub(crate) fn parser_limits(fuel: Fuel) -> ParserLimits {
    ParserLimits {
        step_lexer_fuel: fuel.0.saturating_mul(Fuel::UNITS_OF_A_STEP),
        max_lexer_states: MAX_LEXER_STATES,
        max_grammar_size: 100_000,
        // Errors with the parser's state and the grammar are too long for clients and quote what others sent.
        verbose_errors: false,
        ..ParserLimits::default()
    }
}
