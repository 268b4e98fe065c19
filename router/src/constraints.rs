//! The check of constraints before a request costs anything else: its prompt is not tokenised yet, and it holds
//! nothing.
//!
//! Checks run in a lane of their own, few at a time, so that a client that sends costly schemas delays neither requests
//! without constraints nor the tokenising of others. In the lane, each API key, and without keys each address, has its
//! turns. Results are kept, so that a client that sends its schema with every request waits once.

mod checker;
mod verdicts;

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use prost::Message;
use tutti_constraints::ConstraintError;
use tutti_proto::v1;
use tutti_runtime::Error;

use self::checker::Checker;
use crate::{
    keys::Share,
    served::ServedModel,
    work_lane::{LaneSize, NotRun, WorkLane},
};

/// Name of a constraint in errors. The surfaces rename it to the client's own name.
pub const CONSTRAINT: &str = "constraint";

/// Maximum size in bytes of a constraint's message. A larger one is over each bound of its kind, too.
const MAX_MESSAGE_BYTES: usize = 512 << 10;
/// Maximum number of constraints that wait for their checks.
const MAX_WAITING: usize = 128;
/// Cores per check that runs at a time. The others are for requests without constraints.
const CORES_PER_CHECK: usize = 4;

/// Checks the constraints of requests.
pub struct ConstraintChecks {
    lane: WorkLane,
    /// The checker for the model that was served at the last check.
    checker: Mutex<Option<Arc<Checker>>>,
}

/// The way in which a check got its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckedBy {
    /// An earlier request had the same constraint.
    Known,
    /// The constraint was compiled.
    Compiling,
}

impl ConstraintChecks {
    /// A lane for as many checks at a time as the machine has cores to spare.
    pub fn new() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self::with_threads((cores / CORES_PER_CHECK).max(1))
    }

    fn with_threads(threads: usize) -> Self {
        // Every check costs the same: callers take turns check by check.
        let lane = WorkLane::new(LaneSize { threads, queue: MAX_WAITING, quantum: 1 });
        Self { lane, checker: Mutex::default() }
    }

    /// Checks a constraint for a model. The error's field is [`CONSTRAINT`] with the position in the constraint.
    pub async fn check(
        &self,
        constraint: v1::Constraint,
        model: &ServedModel,
        share: Share,
    ) -> Result<CheckedBy, Error> {
        let Some(tokenizer) = &model.text.tokenizer else {
            let message = "needs a tokenizer, and the server runs with skip_tokenizer_init";
            return Err(Error::invalid(CONSTRAINT, message));
        };
        let bytes = constraint.encoded_len();
        if bytes > MAX_MESSAGE_BYTES {
            let message = format!("has {bytes} bytes; the limit is {MAX_MESSAGE_BYTES}");
            return Err(Error::invalid(CONSTRAINT, message));
        }
        let checker = self.checker(model);
        let key: Arc<[u8]> = constraint.encode_to_vec().into();
        if let Some(verdict) = checker.known(&key) {
            return verdict.map(|()| CheckedBy::Known).map_err(to_client);
        }
        let tokenizer = tokenizer.clone();
        let check = move || checker.check(key, constraint, tokenizer.head());
        let verdict = self.lane.run(share, 1, check).await.map_err(|error| match error {
            NotRun::Full { ahead, limit } => {
                let message = format!("{ahead} constraints are waiting to be checked, the limit is {limit}");
                Error::overloaded(message, Duration::from_secs(1))
            }
            NotRun::Failed(error) => error,
        })?;
        verdict.map(|()| CheckedBy::Compiling).map_err(to_client)
    }

    /// The checker for a model.
    fn checker(&self, model: &ServedModel) -> Arc<Checker> {
        let mut checker = self.checker.lock();
        match &*checker {
            Some(of_model) if of_model.is_of(model) => of_model.clone(),
            _ => checker.insert(Arc::new(Checker::of(model))).clone(),
        }
    }
}

/// An error of the library as the client's.
fn to_client(error: ConstraintError) -> Error {
    let ConstraintError { path, message, .. } = error;
    match path.as_str() {
        "" | CONSTRAINT => Error::invalid(CONSTRAINT, message),
        // The fault is the checkpoint's.
        "vocabulary" | "tokenizer.json" => {
            Error::invalid(CONSTRAINT, format!("cannot be enforced for this model: {path} {message}"))
        }
        _ => Error::invalid(format!("{CONSTRAINT}.{path}"), message),
    }
}

/// Renames the field of a constraint's error to the client's `name` for the constraint. Positions inside it stay.
pub fn respell(error: Error, name: &str) -> Error {
    let renamed = match error.field().and_then(|field| field.strip_prefix(CONSTRAINT)) {
        Some("") => name.to_owned(),
        Some(path) => match path.strip_prefix('.') {
            Some(path) => {
                let inside = path.find(['.', '[']).map_or("", |at| &path[at..]);
                format!("{name}{inside}")
            }
            None => return error,
        },
        None => return error,
    };
    error.with_field(renamed)
}

#[cfg(test)]
mod tests;
