//! The vocabulary of the worker's model, prepared for masks.

use std::sync::{Arc, Mutex, PoisonError};

use tutti_constraints::{Environment, Vocabulary};

/// Reads the vocabulary of the worker's model. The error is for clients.
pub type ReadVocabulary = Arc<dyn Fn() -> Result<Vocabulary, String> + Send + Sync>;

/// Maximum number of environments. A template has one or two kinds of thinking blocks, and each kind needs an
/// environment of some sixty megabytes, because a mask must not depend on other requests' blocks.
const MAX_ENVIRONMENTS: usize = 4;

/// The environments, made when a request needs them first. The one that was used longest ago is dropped first.
pub(super) struct Environments {
    read: ReadVocabulary,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// `None` until a request needs it. A failure stays, because a model's files do not change.
    vocabulary: Option<Result<Vocabulary, String>>,
    /// The environments by the tokens of thinking blocks, the one that was used last at the end.
    known: Vec<(Vec<u32>, Arc<Environment>)>,
}

impl Environments {
    pub fn new(read: ReadVocabulary) -> Self {
        Self { read, state: Mutex::default() }
    }

    /// The environment for constraints whose thinking block has these tokens.
    pub fn of(&self, markers: &[u32]) -> Result<Arc<Environment>, String> {
        // Another thread that needs an environment waits until it is made.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { vocabulary, known } = &mut *state;
        if let Some(index) = known.iter().position(|(of, _)| of == markers) {
            let found = known.remove(index);
            let environment = Arc::clone(&found.1);
            known.push(found);
            return Ok(environment);
        }
        let vocabulary = vocabulary.get_or_insert_with(|| (self.read)()).as_ref().map_err(String::clone)?;
        let began = std::time::Instant::now();
        let vocabulary = vocabulary.with_special(markers).map_err(|error| error.to_string())?;
        let environment = Arc::new(Environment::new(&vocabulary).map_err(|error| error.to_string())?);
        tracing::info!(
            tokens = vocabulary.tokens().len(),
            ms = began.elapsed().as_millis() as u64,
            "vocabulary prepared for masks"
        );
        if known.len() == MAX_ENVIRONMENTS {
            known.remove(0);
        }
        known.push((markers.to_vec(), Arc::clone(&environment)));
        Ok(environment)
    }
}
