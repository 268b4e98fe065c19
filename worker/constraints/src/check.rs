//! The check of a constraint before its request is accepted.

use std::time::{Duration, Instant};

use crate::{
    constraint::{Constraint, Kind, Strictness, Thinking},
    environment::Environment,
    error::{ConstraintError, NO_TOKEN},
    grammar,
    limits::{Fuel, MAX_BYTES, PROBED_TOKENS, STACK_BYTES},
    matcher::Progress,
    schema, text_bounds,
    thread::Deadline,
};

impl Environment {
    /// Checks a constraint, best in the environment of [`Vocabulary::single_bytes`](crate::Vocabulary::single_bytes).
    ///
    /// Bounds come first, then the keywords and strict rules of schemas, then a compilation and a few tokens, all
    /// within one time limit, such as [`CHECK_TIME`](crate::CHECK_TIME). A caller bounds how many checks run at a time.
    pub fn check(&self, constraint: &Constraint, limit: Duration) -> Result<(), ConstraintError> {
        let deadline = Deadline::at(Instant::now() + limit);
        deadline.run(STACK_BYTES, || self.check_by_compiling(constraint, &deadline))?
    }

    fn check_by_compiling(
        &self,
        constraint: &Constraint,
        deadline: &Deadline,
    ) -> Result<(), ConstraintError> {
        check_bounds(constraint)?;
        // The answer alone, so that the probe meets its limits and not those of the thinking block.
        let answer = Constraint { thinking: Thinking::Closed, ..constraint.clone() };
        self.probe(&answer, deadline).map_err(|error| self.locate(&answer, error, deadline))?;
        match constraint.thinking {
            Thinking::Closed => Ok(()),
            _ => self.probe(constraint, deadline).map_err(|error| at_root(constraint, error)),
        }
    }

    /// Compiles a constraint and matches a few tokens, since some limits hold only then.
    fn probe(&self, constraint: &Constraint, deadline: &Deadline) -> Result<(), ConstraintError> {
        deadline.check()?;
        let parser = self.parser(grammar::of(constraint, self.special())?, Fuel::OF_A_STEP)?;
        let mut matcher = self.matcher(&parser);
        deadline.watch(matcher.canceller())?;
        let mut words = vec![0; matcher.mask_words()];
        for n in 0..PROBED_TOKENS {
            matcher.mask(&mut words).map_err(|error| match error.message == NO_TOKEN {
                true => ConstraintError::at("", "allows no finite text"),
                false => error,
            })?;
            // From both ends in turn: the first tokens are white space, and a text of white space meets few limits.
            let token = match n % 2 {
                0 => self.text_tokens(&words).next(),
                _ => self.text_tokens(&words).next_back(),
            };
            let Some(token) = token else { break };
            if matcher.commit(token)? == Progress::Finished {
                break;
            }
        }
        deadline.check()
    }

    /// The tokens of a mask that are no end tokens.
    fn text_tokens<'a>(&'a self, words: &'a [u32]) -> impl DoubleEndedIterator<Item = u32> + 'a {
        let is_set = move |token: &u32| words[*token as usize / 32] >> (token % 32) & 1 == 1;
        (0..words.len() as u32 * 32).filter(move |token| is_set(token) && !self.ends().contains(token))
    }

    /// Adds the position to an error of the library.
    fn locate(
        &self,
        constraint: &Constraint,
        error: ConstraintError,
        deadline: &Deadline,
    ) -> ConstraintError {
        let Kind::JsonSchema { schema, .. } = &constraint.kind else { return at_root(constraint, error) };
        if !error.path.is_empty() || deadline.check().is_err() {
            return at_root(constraint, error);
        }
        schema::locate::locate("schema", schema, error, &mut |child| {
            let kind = Kind::JsonSchema { schema: child.clone(), strictness: Strictness::Lenient };
            self.probe(&Constraint { kind, ..constraint.clone() }, deadline).err()
        })
    }
}

/// Checks what needs no compilation.
fn check_bounds(constraint: &Constraint) -> Result<(), ConstraintError> {
    match &constraint.kind {
        Kind::JsonObject => Ok(()),
        Kind::JsonSchema { schema, strictness } => schema::check(root(constraint), schema, *strictness),
        Kind::Regex(pattern) => text_bounds::check_whole_regex(root(constraint), pattern),
        Kind::Choice(choices) => text_bounds::check_choices(root(constraint), choices),
        Kind::Lark(grammar) => text_bounds::check_lark(root(constraint), grammar),
        Kind::StructuralTags { tags, triggers } => {
            text_bounds::check_tags(root(constraint), tags, triggers)?;
            let sizes = tags.iter().map(|tag| tag.schema.to_string().len());
            text_bounds::at_most("structural_tag", "bytes of schemas", sizes.sum(), MAX_BYTES)?;
            for (n, tag) in tags.iter().enumerate() {
                let path = format!("structural_tag.structures[{n}].schema");
                schema::check(&path, &tag.schema, Strictness::Lenient)?;
            }
            Ok(())
        }
    }
}

fn at_root(constraint: &Constraint, error: ConstraintError) -> ConstraintError {
    match error.path.is_empty() {
        true => ConstraintError { path: root(constraint).to_owned(), ..error },
        false => error,
    }
}

/// The name of a constraint in errors.
fn root(constraint: &Constraint) -> &'static str {
    match constraint.kind {
        Kind::JsonObject => "json_object",
        Kind::JsonSchema { .. } => "schema",
        Kind::Regex(_) => "regex",
        Kind::Choice(_) => "choice",
        Kind::Lark(_) => "grammar",
        Kind::StructuralTags { .. } => "structural_tag",
    }
}
