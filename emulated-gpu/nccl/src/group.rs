//! Groups of calls: a thread collects operations and joining communicators between `ncclGroupStart` and `ncclGroupEnd`.

use std::cell::RefCell;
use std::sync::Arc;

use tutti_emulated_exports::{Stream, WorkKind};

use crate::communicator::Communicator;
use crate::operation::{self, Operation};
use crate::result::{Error, Outcome};

#[derive(Default)]
struct Group {
    depth: usize,
    operations: Vec<(Stream, Operation)>,
    joining: Vec<Arc<Communicator>>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// Opens a group. Groups can be nested.
pub fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Closes a group. The end of the outermost group submits all operations and waits until all communicators have joined.
///
/// # Errors
///
/// `INVALID_USAGE` without a group, the error of an operation's submission, or the error that kept a rank from joining.
pub fn end() -> Outcome {
    let ended = GROUP.with_borrow_mut(|group| {
        group.depth = group.depth.checked_sub(1).ok_or(Error::INVALID_USAGE)?;
        Ok(if group.depth == 0 { std::mem::take(group) } else { Group::default() })
    })?;
    for communicator in ended.joining {
        communicator.wait_until_joined()?;
    }
    // Operations with the same communicator and the same stream run as one set.
    let mut sets: Vec<(Stream, Vec<Operation>)> = Vec::new();
    for (stream, operation) in ended.operations {
        let same = |set: &&mut (Stream, Vec<Operation>)| {
            set.0 == stream && Arc::ptr_eq(&set.1[0].communicator, &operation.communicator)
        };
        match sets.iter_mut().find(same) {
            Some((_, set)) => set.push(operation),
            None => sets.push((stream, vec![operation])),
        }
    }
    // Submits all sets, even if one set returns `IN_PROGRESS`. Returns a failure rather than `IN_PROGRESS`.
    let outcomes: Vec<Outcome> = sets.into_iter().map(|(stream, set)| submit(stream, set)).collect();
    let is_failure = |outcome: &&Outcome| outcome.is_err_and(|error| error != Error::IN_PROGRESS);
    let worst = outcomes.iter().find(is_failure).or_else(|| outcomes.iter().find(|outcome| outcome.is_err()));
    worst.copied().unwrap_or(Ok(()))
}

/// Submits an operation at once or, inside a group, at the group's end.
///
/// # Errors
///
/// `UNHANDLED_CUDA_ERROR` if the driver refuses the operation; `IN_PROGRESS` if the communicator is non-blocking.
pub fn add(stream: Stream, operation: Operation) -> Outcome {
    let kept = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Err(operation);
        }
        group.operations.push((stream, operation));
        Ok(())
    });
    kept.or_else(|operation| submit(stream, vec![operation]))
}

/// Waits until a rank has joined. Inside a group, [`end`] waits instead.
///
/// # Errors
///
/// The error that kept the rank from joining.
pub fn add_joining(communicator: Arc<Communicator>) -> Outcome {
    let kept = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Err(communicator);
        }
        group.joining.push(communicator);
        Ok(())
    });
    kept.or_else(|communicator| communicator.wait_until_joined())
}

fn submit(stream: Stream, operations: Vec<Operation>) -> Outcome {
    let Some(communicator) = operations.first().map(|operation| operation.communicator.clone()) else {
        return Ok(());
    };
    let driver = communicator.driver;
    let work = Box::new(move || operation::run(&operations));
    driver.submit(stream, WorkKind::Blocking, work).map_err(|_| Error::UNHANDLED_CUDA_ERROR)?;
    communicator.go_on()
}
