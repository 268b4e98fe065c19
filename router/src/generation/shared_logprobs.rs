//! The logprobs of one prompt. The prompt's first choice receives them, and all choices of the prompt report them.
//!
//! The model computes the logprobs once per prompt. The first delta of every choice reports them, so the streams of the
//! other choices wait for them.

use std::{
    sync::Arc,
    task::{Context, Poll, Waker},
};

use parking_lot::Mutex;
use tutti_proto::cluster::v1::TokenLogprob;

/// The logprobs, or the tasks that wait for them. Clones share the state.
#[derive(Clone, Default)]
pub struct SharedLogprobs(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    logprobs: Option<Arc<[TokenLogprob]>>,
    waiting: Vec<Waker>,
}

impl SharedLogprobs {
    /// Sets the logprobs, and wakes the choices that wait for them.
    pub fn set(&self, logprobs: Arc<[TokenLogprob]>) {
        let waiting = {
            let mut state = self.0.lock();
            state.logprobs = Some(logprobs);
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Returns the logprobs if they have arrived. Otherwise wakes the task when they arrive.
    pub fn poll(&self, context: &Context<'_>) -> Poll<Arc<[TokenLogprob]>> {
        let mut state = self.0.lock();
        if let Some(logprobs) = &state.logprobs {
            return Poll::Ready(logprobs.clone());
        }
        let waker = context.waker();
        if !state.waiting.iter().any(|waiting| waiting.will_wake(waker)) {
            state.waiting.push(waker.clone());
        }
        Poll::Pending
    }
}
