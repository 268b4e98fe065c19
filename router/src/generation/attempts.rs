//! The attempts at one choice: the choice is sent to a conductor, and to another conductor if that attempt fails.
//!
//! After a failure before the first token, the same request is sent again: a **retry**. After a later failure, the
//! tokens received so far are sent with the request as `generated`: a **replay**. The next conductor continues after
//! these tokens, with the same random numbers, penalties and counts. In both cases the client sees the events of a
//! single request.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use futures_util::{Stream, stream};
use tokio::time::timeout;
use tonic::Streaming;
use tutti_proto::cluster::v1::{self as pb, FinishReason, Finished, RequestEvent, SubmitRequest};
use tutti_runtime::{
    Error, ErrorKind,
    trace::{SpanKind, TraceSpan},
};

use crate::{
    fleet::{Avoided, Failure, Fleet, Lease, Member, Need, PickRequest, PromptBlocks, Recovery},
    keys::Share,
    metrics::RequestName,
    served::ServedModel,
};

/// A choice to be generated.
pub struct Wanted {
    /// The model that the choice was prepared for. The choice is not sent to a conductor that serves another model.
    pub model: Arc<ServedModel>,
    /// The prompt.
    pub prompt: Arc<PromptBlocks>,
    /// The request without its prompt.
    pub spec: pb::RequestSpec,
    /// Time at which the client stops waiting.
    pub deadline: Option<Instant>,
    /// The request's name in logs, in its trace and at conductors.
    pub name: RequestName,
    /// The caller's share, by which conductors divide waiting work fairly.
    pub share: Share,
}

/// The state of a choice over all attempts.
pub struct Attempts {
    fleet: Arc<Fleet>,
    wanted: Wanted,
    /// Tokens received so far.
    generated: Vec<u32>,
    retries: u32,
    replays: u32,
    avoided: Vec<Avoided>,
    /// Time of the first refusal for load after a conductor had accepted the choice.
    busy_since: Option<Instant>,
    running: Option<Running>,
}

/// An attempt that a conductor has accepted.
struct Running {
    lease: Lease,
    events: Streaming<RequestEvent>,
    /// The attempt's span, if the trace is sampled.
    span: Option<TraceSpan>,
}

impl Attempts {
    /// Sends the choice, and returns when a conductor has accepted it. If no conductor is ready, waits for one as
    /// choices in progress do. A refusal for load is returned at once.
    pub async fn start(fleet: Arc<Fleet>, wanted: Wanted) -> Result<Self, Error> {
        let mut attempts = Self {
            fleet,
            wanted,
            generated: Vec::new(),
            retries: 0,
            replays: 0,
            avoided: Vec::new(),
            busy_since: None,
            running: None,
        };
        let mut failure = None;
        loop {
            let Some(lease) = attempts.fleet.pick(attempts.pick_request(Need::Any)) else {
                let nowhere = || Failure::transport("no conductor that can be reached serves the model now");
                return attempts.start_late(failure.unwrap_or_else(nowhere)).await;
            };
            match attempts.submit(lease).await {
                Ok(()) => return Ok(attempts),
                Err(refused) => failure = Some(attempts.may_retry(refused)?),
            }
        }
    }

    /// Waits until a conductor becomes ready and accepts the choice. A router whose choices are not retried does not
    /// wait, as one that is embedded in its only conductor.
    async fn start_late(mut self, failure: Failure) -> Result<Self, Error> {
        if failure.is_load() || self.fleet.settings().max_retries == 0 {
            return Err(failure.into_error());
        }
        self.resend(failure).await?;
        Ok(self)
    }

    /// The events of the choice from all conductors, as a stream. The last item is a terminal event or an error.
    pub fn into_stream(self) -> impl Stream<Item = Result<RequestEvent, Error>> + Send {
        stream::unfold(self, |mut attempts| async {
            let event = attempts.next().await?;
            if !matches!(&event, Ok(event) if event.finished.is_none()) {
                attempts.running = None;
            }
            Some((event, attempts))
        })
    }

    fn pick_request(&self, need: Need) -> PickRequest<'_> {
        let Wanted { model, prompt, .. } = &self.wanted;
        PickRequest { model, prompt, generated: self.generated.len(), avoided: &self.avoided, need }
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

    /// Records an event's tokens, and removes from the event the tokens that an earlier attempt has delivered.
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

    /// Sends the choice to another conductor after a failed attempt, and waits for a ready conductor if necessary. If
    /// the choice already has all its tokens and only the terminal event is missing, returns that event instead.
    async fn recover(&mut self, failure: Failure) -> Result<Option<RequestEvent>, Error> {
        let recovery = if self.generated.is_empty() { Recovery::Retry } else { Recovery::Replay };
        let Some(mut running) = self.running.take() else { return Err(failure.into_error()) };
        if let Some(span) = &mut running.span {
            span.fail(failure.error().message().to_owned());
        }
        let lost = running.lease.member().clone();
        running.lease.fails(&failure);
        if !failure.may_go_elsewhere() {
            return Err(failure.into_error());
        }
        if let Some(finished) = self.ending() {
            return Ok(Some(RequestEvent { finished: Some(finished), ..RequestEvent::default() }));
        }
        let settings = self.fleet.settings();
        let (used, limit) = match recovery {
            Recovery::Replay => (&mut self.replays, settings.max_replays),
            Recovery::Retry => (&mut self.retries, settings.max_retries),
        };
        // A worker may refuse for load after its conductor has accepted the choice, and this may repeat. Such failures
        // are limited by time instead of by count.
        let is_busy = failure.is_load()
            && self.busy_since.get_or_insert_with(Instant::now).elapsed() < settings.recovery();
        if *used >= limit && !is_busy {
            return Err(gave_up(&failure, *used, recovery));
        }
        *used += u32::from(!is_busy);
        self.avoid(lost.clone());
        self.fleet.count_leaving(&lost, recovery);
        let tokens = self.generated.len();
        // This runs in the client's stream, outside of the request's span.
        self.wanted.name.log.in_scope(|| {
            tracing::info!(conductor = %lost.name, tokens, error = %failure.error(), "a choice moves to another conductor");
        });
        self.resend(failure).await?;
        Ok(None)
    }

    /// Sends the choice to a conductor that is ready, or that becomes ready in time. A conductor on which an attempt
    /// failed qualifies again only after a later poll says that the conductor is ready.
    async fn resend(&mut self, mut failure: Failure) -> Result<(), Error> {
        let until = Instant::now() + self.fleet.settings().recovery();
        let mut changes = self.fleet.changes();
        loop {
            changes.mark_unchanged();
            if let Some(lease) = self.fleet.pick(self.pick_request(Need::Ready)) {
                match self.submit(lease).await {
                    Ok(()) => return Ok(()),
                    // A conductor that polls as ready and refuses each choice would otherwise get it at every poll.
                    Err(refused) if self.generated.is_empty() => failure = self.may_retry(refused)?,
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

    /// Time until `then` or the client's deadline, whichever is earlier. Returns an error if the deadline has passed.
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

    /// Sends the choice to the lease's conductor, and waits until the conductor accepts or refuses it.
    async fn submit(&mut self, lease: Lease) -> Result<(), Failure> {
        let left = |deadline: Instant| millis(deadline.saturating_duration_since(Instant::now()));
        let spec = &self.wanted.spec;
        let mut span = self.span(lease.member());
        let request = SubmitRequest {
            spec: Some(pb::RequestSpec {
                prompt: self.wanted.prompt.tokens().to_vec(),
                // Not requested again in a replay: all logprobs of the prompt arrive before the first output token.
                prompt_logprobs: spec.prompt_logprobs.filter(|_| self.generated.is_empty()),
                ..spec.clone()
            }),
            timeout_ms: self.wanted.deadline.map(left),
            generated: self.generated.clone(),
            trace: span.as_ref().and_then(TraceSpan::context).map(|context| context.to_message()),
            share: self.wanted.share.number(),
            request_id: self.wanted.name.id.as_str().to_owned(),
        };
        match lease.member().submit(request).await {
            Ok(events) => {
                self.running = Some(Running { lease, events, span });
                Ok(())
            }
            Err(failure) => {
                if let Some(span) = &mut span {
                    span.fail(failure.error().message().to_owned());
                }
                self.avoid(lease.member().clone());
                lease.fails(&failure);
                Err(failure)
            }
        }
    }

    /// Begins the span of an attempt at this conductor, if the trace is sampled.
    fn span(&self, conductor: &Member) -> Option<TraceSpan> {
        let mut span = self.wanted.name.trace.as_ref()?.child("attempt", SpanKind::Client, SystemTime::now());
        span.set("tutti.conductor", conductor.name.clone());
        span.set("tutti.attempt.number", i64::from(self.retries + self.replays));
        span.set("tutti.attempt.generated_tokens", self.generated.len() as i64);
        Some(span)
    }

    /// Avoids a conductor until a later poll says that the conductor is ready.
    fn avoid(&mut self, member: Arc<Member>) {
        self.avoided.retain(|avoided| !Arc::ptr_eq(avoided.member(), &member));
        self.avoided.push(Avoided::now(member));
    }

    /// Counts a refused attempt. Returns an error if no retry is left, or if no other conductor may succeed.
    fn may_retry(&mut self, failure: Failure) -> Result<Failure, Error> {
        if !failure.may_go_elsewhere() {
            return Err(failure.into_error());
        }
        // A refusal for load uses up no retry. The attempts still end, because each conductor is avoided after its
        // refusal.
        if !failure.is_load() {
            if self.retries >= self.fleet.settings().max_retries {
                return Err(gave_up(&failure, self.retries, Recovery::Retry));
            }
            self.retries += 1;
        }
        if let Some(left) = self.avoided.last() {
            self.fleet.count_leaving(left.member(), Recovery::Retry);
        }
        Ok(failure)
    }

    /// The terminal event that a worker would send after the tokens received so far; `None` if more tokens would
    /// follow.
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

/// The error that the client gets when no attempt is left. `tries` is the number of retries or replays made.
fn gave_up(failure: &Failure, tries: u32, recovery: Recovery) -> Error {
    let error = failure.error();
    if tries == 0 {
        return error.clone();
    }
    let what = match recovery {
        Recovery::Retry => "retries",
        Recovery::Replay => "replays",
    };
    let message = format!("{} (after {tries} {what} on other conductors)", error.message());
    match error.retry_after() {
        Some(after) if error.kind() == ErrorKind::Overloaded => Error::overloaded(message, after),
        _ if error.kind() == ErrorKind::Unavailable => Error::unavailable(message),
        _ => Error::new(error.kind(), message),
    }
}

/// Milliseconds, rounded up so that a short time does not become 0.
pub(super) fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)
}
