//! The check of constraints for one served model.

use std::sync::{Arc, OnceLock, Weak};

use tutti_constraints::{CHECK_TIME, Constraint, ConstraintError, Declared, Environment, Vocabulary};
use tutti_proto::v1;

use super::verdicts::{Verdict, Verdicts};
use crate::served::{ServedModel, ServedText};

/// Maximum size in bytes of the results that are kept.
const MAX_VERDICT_BYTES: usize = 4 << 20;
/// Maximum size in bytes of a constraint whose result is kept. Larger ones would push out the schemas of others.
const MAX_KEPT_BYTES: usize = 64 << 10;

/// Checks constraints for one served model.
pub struct Checker {
    /// The model's text files. They are not kept for the sake of checks.
    text: Weak<ServedText>,
    vocab_size: u32,
    ends: Vec<u32>,
    /// The tokens as checks need them, made at the first check.
    environment: OnceLock<Result<Environment, ConstraintError>>,
    verdicts: Verdicts,
}

impl Checker {
    /// A checker for a model.
    pub fn of(model: &ServedModel) -> Self {
        Self {
            text: Arc::downgrade(&model.text),
            vocab_size: model.description.vocab_size,
            ends: model.description.eos_token_ids.clone(),
            environment: OnceLock::new(),
            verdicts: Verdicts::new(MAX_VERDICT_BYTES),
        }
    }

    /// True if this checker is for the model.
    pub fn is_of(&self, model: &ServedModel) -> bool {
        let description = &model.description;
        Weak::ptr_eq(&self.text, &Arc::downgrade(&model.text))
            && self.vocab_size == description.vocab_size
            && self.ends == description.eos_token_ids
    }

    /// The result of a check that is known.
    pub fn known(&self, key: &Arc<[u8]>) -> Option<Verdict> {
        self.verdicts.get(key)
    }

    /// Checks a constraint and keeps the result. CPU-bound, for up to [`CHECK_TIME`] and the longest compilation.
    ///
    /// The thinking block in front of an answer needs no check: it is no part of what clients send, and its tokens are
    /// known once the prompt is rendered.
    pub fn check(
        &self,
        key: Arc<[u8]>,
        constraint: v1::Constraint,
        tokenizer: &serde_json::Value,
    ) -> Verdict {
        // Another request may have had the same constraint meanwhile.
        if let Some(verdict) = self.known(&key) {
            return verdict;
        }
        let environment = self.environment.get_or_init(|| {
            let declared = Declared { logits: self.vocab_size as usize, ends: &self.ends, markers: &[] };
            Environment::new(&Vocabulary::for_checks(tokenizer, &declared)?)
        });
        let environment = environment.as_ref().map_err(Clone::clone)?;
        let verdict = Constraint::from_message(constraint, None)
            .and_then(|constraint| environment.check(&constraint, CHECK_TIME));
        if key.len() <= MAX_KEPT_BYTES {
            self.verdicts.keep(key, verdict.clone());
        }
        verdict
    }
}
