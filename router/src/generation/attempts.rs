//! One choice's way through the fleet: sent to a conductor, and on to another where one is lost.
//!
//! A try that breaks before the first token is a **retry**: the same request again. Behind it, it is a **replay**: the
//! tokens that came go with the request as `generated`, so that the next conductor goes on where the last one stopped,
//! with the same random numbers, penalties and counts. Either way the events that come out are those of one request.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::{Stream, stream};
use tokio::time::timeout;
use tonic::Streaming;
use tutti_proto::cluster::v1::{self as pb, FinishReason, Finished, RequestEvent, SubmitRequest};
use tutti_runtime::{Error, ErrorKind};

use super::generator::millis;
use crate::{
    fleet::{Avoided, Failure, Fleet, Lease, Member, Need, PromptBlocks},
    served::ServedModel,
};

/// A choice as a conductor is asked for it.
pub struct Wanted {
    /// What it was prepared for: no conductor that serves something else may have it.
    pub model: Arc<ServedModel>,
    /// The prompt.
    pub prompt: Arc<PromptBlocks>,
    /// All else; its own prompt is empty.
    pub spec: pb::RequestSpec,
    /// When it is worth nothing any more.
    pub deadline: Option<Instant>,
}

/// See the module.
pub struct Attempts {
    fleet: Arc<Fleet>,
    wanted: Wanted,
    /// Tokens received so far.
    generated: Vec<u32>,
    retries: u32,
    replays: u32,
    avoided: Vec<Avoided>,
    running: Option<Running>,
}

/// A try that a conductor has accepted.
struct Running {
    lease: Lease,
    events: Streaming<RequestEvent>,
}

impl Attempts {
    /// Sends the choice off: when this returns, a conductor has accepted it. What no conductor can take now is refused
    /// at once.
    pub async fn start(fleet: Arc<Fleet>, wanted: Wanted) -> Result<Self, Error> {
        let mut attempts = Self {
            fleet,
            wanted,
            generated: Vec::new(),
            retries: 0,
            replays: 0,
            avoided: Vec::new(),
            running: None,
        };
        let mut failure = None;
        loop {
            let model = &attempts.wanted.model;
            let Some(lease) =
                attempts.fleet.pick(model, &attempts.wanted.prompt, 0, &attempts.avoided, Need::Any)
            else {
                let nowhere = || Error::unavailable("no conductor that can be reached serves the model now");
                return Err(failure.map_or_else(nowhere, Failure::into_error));
            };
            match attempts.submit(lease).await {
                Ok(()) => return Ok(attempts),
                Err(refused) => failure = Some(attempts.may_retry(refused)?),
            }
        }
    }

    /// The events of one request, whichever conductors they come from; the last is an ending or an error.
    pub fn into_stream(self) -> impl Stream<Item = Result<RequestEvent, Error>> + Send {
        stream::unfold(self, |mut attempts| async {
            let event = attempts.next().await?;
            if !matches!(&event, Ok(event) if event.finished.is_none()) {
                attempts.running = None;
            }
            Some((event, attempts))
        })
    }

    async fn next(&mut self) -> Option<Result<RequestEvent, Error>> {
        loop {
            let running = self.running.as_mut()?;
            let failure = match running.events.message().await {
                Ok(Some(mut event)) => {
                    self.take(&mut event);
                    return Some(Ok(event));
                }
                Ok(None) => Failure::transport("the conductor ended the stream of an unfinished request"),
                Err(status) => status.into(),
            };
            match self.recover(failure).await {
                Ok(None) => {}
                Ok(Some(ending)) => return Some(Ok(ending)),
                Err(error) => return Some(Err(error)),
            }
        }
    }

    /// Notes what an event brings, and takes out of it what another try has brought.
    fn take(&mut self, event: &mut RequestEvent) {
        let known = self.generated.len();
        event.tokens.retain(|token| token.index as usize >= known);
        self.generated.extend(event.tokens.iter().map(|token| token.token_id));
        if let Some(running) = &mut self.running
            && (!event.tokens.is_empty() || event.finished.is_some())
        {
            running.lease.holds(self.wanted.prompt.tokens().len() + self.generated.len());
        }
    }

    /// A try has broken: sends the choice on, waiting for a conductor for a while where there is none. Returns its
    /// ending where nothing but that was missing.
    async fn recover(&mut self, failure: Failure) -> Result<Option<RequestEvent>, Error> {
        let behind = !self.generated.is_empty();
        let Some(running) = self.running.take() else { return Err(failure.into_error()) };
        let lost = running.lease.member().clone();
        running.lease.fails(&failure);
        if !failure.may_go_elsewhere() {
            return Err(failure.into_error());
        }
        if let Some(finished) = self.ending() {
            return Ok(Some(RequestEvent { finished: Some(finished), ..RequestEvent::default() }));
        }
        let settings = self.fleet.settings();
        let (used, limit) = match behind {
            true => (&mut self.replays, settings.max_replays),
            false => (&mut self.retries, settings.max_retries),
        };
        if *used >= limit {
            return Err(gave_up(&failure, *used, behind));
        }
        *used += 1;
        self.avoid(lost.clone());
        self.fleet.count_leaving(&lost, behind);
        let tokens = self.generated.len();
        tracing::info!(conductor = %lost.name, tokens, error = %failure.error(), "a choice goes on elsewhere");
        self.resend(failure).await?;
        Ok(None)
    }

    /// Sends the choice to whoever is ready, or becomes ready in time. Each conductor is tried again only once it has
    /// said, since it failed, that it is ready.
    async fn resend(&mut self, mut failure: Failure) -> Result<(), Error> {
        let until = Instant::now() + self.fleet.settings().recovery();
        let mut changes = self.fleet.changes();
        loop {
            changes.mark_unchanged();
            let (model, prompt) = (&self.wanted.model, &self.wanted.prompt);
            let lease = self.fleet.pick(model, prompt, self.generated.len(), &self.avoided, Need::Ready);
            if let Some(lease) = lease {
                match self.submit(lease).await {
                    Ok(()) => return Ok(()),
                    Err(refused) if refused.may_go_elsewhere() => failure = refused,
                    Err(refused) => return Err(refused.into_error()),
                }
                continue;
            }
            let left = self.until(until)?;
            if left.is_zero() || timeout(left, changes.changed()).await.is_err() {
                self.until(until)?;
                return Err(failure.into_error());
            }
        }
    }

    /// How long until then; an error if the client's time is over before.
    fn until(&self, then: Instant) -> Result<Duration, Error> {
        let now = Instant::now();
        match self.wanted.deadline {
            Some(deadline) if deadline <= now => {
                let message = "no conductor could go on with the request within its deadline";
                Err(Error::new(ErrorKind::DeadlineExceeded, message))
            }
            Some(deadline) => Ok(then.min(deadline).saturating_duration_since(now)),
            None => Ok(then.saturating_duration_since(now)),
        }
    }

    /// Sends it there, and waits for its acceptance.
    async fn submit(&mut self, lease: Lease) -> Result<(), Failure> {
        let left = |deadline: Instant| millis(deadline.saturating_duration_since(Instant::now()));
        let spec = &self.wanted.spec;
        let request = SubmitRequest {
            spec: Some(pb::RequestSpec {
                prompt: self.wanted.prompt.tokens().to_vec(),
                // All of the prompt's logprobs have come before the first token.
                prompt_logprobs: spec.prompt_logprobs.filter(|_| self.generated.is_empty()),
                ..spec.clone()
            }),
            timeout_ms: self.wanted.deadline.map(left),
            generated: self.generated.clone(),
        };
        match lease.member().submit(request).await {
            Ok(events) => {
                self.running = Some(Running { lease, events });
                Ok(())
            }
            Err(failure) => {
                self.avoid(lease.member().clone());
                lease.fails(&failure);
                Err(failure)
            }
        }
    }

    /// Passes a conductor over until it has said anew that it is ready.
    fn avoid(&mut self, member: Arc<Member>) {
        self.avoided.retain(|avoided| !Arc::ptr_eq(avoided.member(), &member));
        self.avoided.push(Avoided::now(member));
    }

    /// Counts a try that was not accepted; an error if it was the last, or no other would do better.
    fn may_retry(&mut self, failure: Failure) -> Result<Failure, Error> {
        if !failure.may_go_elsewhere() {
            return Err(failure.into_error());
        }
        if self.retries >= self.fleet.settings().max_retries {
            return Err(gave_up(&failure, self.retries, false));
        }
        self.retries += 1;
        if let Some(left) = self.avoided.last() {
            self.fleet.count_leaving(left.member(), false);
        }
        Ok(failure)
    }

    /// The ending that the tokens received so far amount to, as a worker would have it.
    fn ending(&self) -> Option<Finished> {
        let stopping = self.wanted.spec.stopping.as_ref()?;
        let (last, before) = self.generated.split_last()?;
        let may_stop = before.len() >= stopping.min_tokens as usize;
        let eos = &self.wanted.model.description.eos_token_ids;
        let (reason, stop_token_id) = if may_stop && !stopping.ignore_eos && eos.contains(last) {
            (FinishReason::EndOfSequence, None)
        } else if may_stop && stopping.stop_token_ids.contains(last) {
            (FinishReason::StopToken, Some(*last))
        } else if self.generated.len() >= stopping.max_tokens as usize {
            (FinishReason::Length, None)
        } else {
            return None;
        };
        let generated = self.generated.len() as u32;
        Some(Finished { reason: reason.into(), stop_token_id, generated, ..Finished::default() })
    }
}

/// What the client is told after the last try.
fn gave_up(failure: &Failure, tries: u32, behind: bool) -> Error {
    let error = failure.error();
    if tries == 0 {
        return error.clone();
    }
    let what = if behind { "replays" } else { "retries" };
    let message = format!("{} (after {tries} {what} on other conductors)", error.message());
    match error.retry_after() {
        Some(after) if error.kind() == ErrorKind::Overloaded => Error::overloaded(message, after),
        _ if error.kind() == ErrorKind::Unavailable => Error::unavailable(message),
        _ => Error::new(error.kind(), message),
    }
}
