//! The vocabulary of the worker's model, prepared for masks.

use std::sync::{Arc, Mutex, PoisonError};

use tutti_constraints::{Environment, Vocabulary};

/// Reads the vocabulary of the worker's model. The error is for clients.
pub type ReadVocabulary = Arc<dyn Fn() -> Result<Vocabulary, String> + Send + Sync>;

/// Maximum number of environments. A template has one or two kinds of thinking blocks, and each kind needs an
/// environment of some sixty megabytes, because a mask must not depend on other requests' blocks. Grammars that name
/// tokens share one, whichever they name, so that no client makes the worker prepare others.
const MAX_ENVIRONMENTS: usize = 4;

/// The special tokens of a constraint, besides those of the tokenizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum MoreSpecial {
    /// The tokens of its thinking block.
    Thinking(Vec<u32>),
    /// All added tokens, because the constraint may name them.
    Added,
}

/// The environments, made when a request needs them first. The one that was used longest ago is dropped first.
pub(super) struct Environments {
    read: ReadVocabulary,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// `None` until a request needs it. A failure stays, because a model's files do not change.
    vocabulary: Option<Result<Vocabulary, String>>,
    /// The environments by their special tokens, the one that was used last at the end.
    known: Vec<(MoreSpecial, Arc<Environment>)>,
}

impl Environments {
    pub fn new(read: ReadVocabulary) -> Self {
        Self { read, state: Mutex::default() }
    }

    /// The environment for constraints with these special tokens.
    pub fn of(&self, special: &MoreSpecial) -> Result<Arc<Environment>, String> {
        // Another thread that needs an environment waits until it is made.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { vocabulary, known } = &mut *state;
        if let Some(index) = known.iter().position(|(of, _)| of == special) {
            let found = known.remove(index);
            let environment = Arc::clone(&found.1);
            known.push(found);
            return Ok(environment);
        }
        let vocabulary = vocabulary.get_or_insert_with(|| (self.read)()).as_ref().map_err(String::clone)?;
        let began = std::time::Instant::now();
        let vocabulary = match special {
            MoreSpecial::Thinking(tokens) => {
                vocabulary.with_special(tokens).map_err(|error| error.to_string())?
            }
            MoreSpecial::Added => vocabulary.with_added_special(),
        };
        let environment = Arc::new(Environment::new(&vocabulary).map_err(|error| error.to_string())?);
        tracing::info!(
            tokens = vocabulary.tokens().len(),
            ms = began.elapsed().as_millis() as u64,
            "vocabulary prepared for masks"
        );
        if known.len() == MAX_ENVIRONMENTS {
            known.remove(0);
        }
        known.push((special.clone(), Arc::clone(&environment)));
        Ok(environment)
    }
}
