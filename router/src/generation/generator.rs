//! Starts generations: admission, validation, tokenising, and one `Submit` call per choice.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use futures_util::future::try_join_all;
use tracing::{Instrument, Span};
use tutti_proto::{RequestParts, cluster::v1 as pb};
use tutti_runtime::{Error, ErrorKind, live::Live, trace::SpanKind};
use tutti_settings::{ChatSpecialTokens, RouterSettings};

use super::{
    admission::{Admission, QueueCost},
    arrival::Arrival,
    attempts::{Attempts, Wanted, millis},
    choice::{Choice, ChoiceSettings},
    decode::{self, Files, MediaPool},
    permits::{Permit, Permits},
    prompts::{self, Echo, EncodedPrompt},
    reading::{self, Reading},
    request::{GenerationRequest, Prompt},
    shared_logprobs::SharedLogprobs,
    stream::{Accepted, ChoiceStream, Generation, GenerationInfo},
    validate,
};
use crate::{
    constraints::ConstraintChecks,
    fleet::{Fleet, PromptBlocks},
    keys::{Entry, Share},
    metrics::{RequestMeter, RequestName, RouterMetrics},
    readers::Readers,
    served::ServedModel,
    text::{
        detokenizer::{Detokenizer, Unfinished},
        pool::{IN_PLACE_BYTES, Lane, TextPool, TextWork},
        tokenizer::SpecialTokens,
    },
    uploads::Upload,
};

/// State shared by the HTTP and gRPC surfaces: the conductors, the served model, and the bounds on running work.
pub struct Generator {
    fleet: Arc<Fleet>,
    pool: TextPool,
    media: MediaPool,
    constraints: ConstraintChecks,
    /// One permit per running choice.
    permits: Arc<Permits>,
    max_choices: u32,
    settings: Live<RouterSettings>,
    admission: Arc<Admission>,
    readers: Readers,
    metrics: RouterMetrics,
}

impl Generator {
    /// Creates a generator for these conductors.
    pub fn new(
        fleet: Arc<Fleet>,
        settings: Live<RouterSettings>,
        admission: Arc<Admission>,
        readers: Readers,
        metrics: RouterMetrics,
    ) -> Result<Self, Error> {
        let config = settings.get();
        Ok(Self {
            fleet,
            pool: TextPool::new(config.tokenizer_threads, config.tokenizer_queue)?,
            media: MediaPool::new(&config)?,
            constraints: ConstraintChecks::new(),
            permits: Permits::new(config.max_concurrent_choices),
            max_choices: config.max_concurrent_choices,
            settings,
            admission,
            readers,
            metrics,
        })
    }

    /// The readers of answers.
    pub fn readers(&self) -> &Readers {
        &self.readers
    }

    /// Maximum number of choices that run at once. A single request may not have more prompts than this.
    pub fn max_choices(&self) -> u32 {
        self.max_choices
    }

    /// The metrics of this front door.
    pub fn metrics(&self) -> &RouterMetrics {
        &self.metrics
    }

    /// The conductors.
    pub fn fleet(&self) -> &Arc<Fleet> {
        &self.fleet
    }

    /// The served model, or an error if it is not known yet.
    pub fn model(&self) -> Result<Arc<ServedModel>, Error> {
        self.fleet.served().ok_or_else(|| Error::unavailable("not ready: the served model is not known yet"))
    }

    /// The served model, or an error if a request names another model.
    pub fn model_named(&self, name: Option<&str>) -> Result<Arc<ServedModel>, Error> {
        let model = self.model()?;
        match name {
            Some(name) if !model.names().any(|served| served == name) => {
                let served: Vec<String> = model.names().map(|served| format!("{served:?}")).collect();
                let message = format!("{name:?} is not served here; the model is {}", served.join(" or "));
                Err(Error::new(ErrorKind::NotFound, message).with_field("model"))
            }
            _ => Ok(model),
        }
    }

    /// Treatment of special tokens in the text of conversations.
    pub fn chat_special_tokens(&self) -> ChatSpecialTokens {
        self.settings.get().chat_special_tokens
    }

    /// Runs a CPU-bound closure on text in a lane of the bounded pool.
    pub async fn on_text<T, F>(&self, work: TextWork, closure: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        // The lines that the closure logs belong to the request.
        let span = Span::current();
        self.pool.run(work, move || span.in_scope(closure)).await
    }

    /// Starts a request. Returns when conductors have accepted all of the request's choices.
    pub async fn start(&self, request: GenerationRequest, arrival: Arrival) -> Result<Generation, Error> {
        let Arrival { entry, client, record, share_of_checks, upload } = arrival;
        let mut meter = RequestMeter::start(&self.metrics, client, record, &request, self.fleet.served());
        let (span, name, timeout) = (meter.span().clone(), meter.name(), request.timeout);
        let accepted = self.accept(request, &entry, name, share_of_checks, upload);
        match within(timeout, accepted).instrument(span).await {
            Ok(accepted) => Ok(Generation::new(accepted, entry, meter)),
            Err(error) => {
                meter.refused(&error);
                Err(error)
            }
        }
    }

    async fn accept(
        &self,
        request: GenerationRequest,
        entry: &Entry,
        name: RequestName,
        share_of_checks: Share,
        upload: Option<Upload>,
    ) -> Result<Accepted, Error> {
        let arrived = Instant::now();
        // The limits are read once, so that all checks of this request's logprobs use the same limits.
        let limits = self.settings.get();
        let model = self.model_named(request.model.as_deref())?;
        decode::check(&request.media, &model, &limits)?;
        if !request.media.is_empty() && request.prompts.len() != 1 {
            let message = format!("cannot be used with {} prompts", request.prompts.len());
            return Err(Error::invalid("media", message));
        }
        let mut request = self.constrain(request, &model, share_of_checks).await?;
        let mut common = validate::check(&request, &model)?;
        common.cache_salt = entry.cache_salt(request.cache_salt);
        let n = request.n.unwrap_or(1);
        // Prompts given as token ids are checked here, before any work. Texts are checked once they are tokenised.
        let known =
            request.prompts.iter().map(|prompt| if let Prompt::Tokens(ids) = prompt { ids.len() } else { 0 });
        validate::prompt_logprobs(known, &request.output, n, limits.max_prompt_logprobs)?;
        entry.check_priority(request.priority)?;
        let choices = self.count_choices(request.prompts.len(), n)?;
        self.check_constraint(&request, &model, &name, share_of_checks).await?;
        let estimate: u64 = request.prompts.iter().map(Prompt::estimate_tokens).sum();
        let asked = request.stopping.max_tokens.or(request.stopping.default_max_tokens).unwrap_or(0);
        entry.reserve(choices, estimate + u64::from(asked) * u64::from(choices))?;
        let permits = self.admit(entry.share(), choices)?;
        let cost = QueueCost { choices: choices.into(), tokens: estimate * u64::from(n) };
        let mut queued = self.admission.enter(request.priority, entry.share(), cost)?;

        let echo =
            request.output.echo.then_some(Echo { keep_special_tokens: request.output.keep_special_tokens });
        let media = std::mem::take(&mut request.media);
        let files = Files { media, upload };
        let media = self.media.decode(files, model.clone(), limits.clone(), share_of_checks, n).await?;
        let prompts = std::mem::take(&mut request.prompts);
        let prompts = {
            let (model, lane) = (model.clone(), lane(&prompts, echo));
            let bytes = prompts.iter().map(Prompt::text_bytes).sum();
            let special_tokens = limits.chat_special_tokens;
            let encode = move || prompts::encode(prompts, media.items, &model, echo, special_tokens);
            // Dropped at the end of this block, also if the client disconnects. The drop ends the span.
            let _span = name
                .trace
                .as_ref()
                .map(|trace| trace.child("tokenize", SpanKind::Internal, SystemTime::now()));
            match lane {
                Some(lane) => self.on_text(TextWork { lane, share: entry.share(), bytes }, encode).await??,
                None => encode()?,
            }
        };
        let tokens: u64 = prompts.iter().map(|prompt| prompt.ids.len() as u64).sum();
        queued.recount(tokens * u64::from(n));
        let lengths = prompts.iter().map(|prompt| prompt.ids.len());
        validate::prompt_logprobs(lengths, &request.output, n, limits.max_prompt_logprobs)?;
        let specs = self.specs(&request, &common, &prompts, &model)?;
        let max_tokens =
            |(_, spec): &(_, pb::RequestSpec)| spec.stopping.as_ref().map_or(0, |s| s.max_tokens.into());
        let output_tokens = specs.iter().map(max_tokens).sum();
        entry.reserve(choices, tokens + output_tokens)?;
        validate::output_logprobs(output_tokens, &request.output, limits.max_output_logprobs)?;
        let settings = settings(&request, &model, &prompts, n);
        let scored = request.output.prompt_logprobs_needed().is_some();
        let shared: Vec<_> = prompts.iter().map(|_| scored.then(SharedLogprobs::default)).collect();
        // The timeout runs from the request's arrival and includes the time for tokenising. If no time is left, the
        // conductor refuses the request.
        let deadline = request.timeout.and_then(|timeout| arrived.checked_add(timeout));
        let share = entry.share();
        let unread = self.readers.output_room().enter(|_| ());
        let started = specs.into_iter().zip(settings).map(|((prompt, spec), settings)| {
            let wanted = Wanted { model: model.clone(), prompt, spec, deadline, name: name.clone(), share };
            let (first, shared) = (settings.index % n == 0, shared[(settings.index / n) as usize].clone());
            let unread = unread.clone();
            async move {
                let attempts = Attempts::start(self.fleet.clone(), wanted).await?;
                Ok::<_, Error>(ChoiceStream::new(Choice::new(settings), attempts, first, shared, unread))
            }
        });
        let choices = try_join_all(started).await?;
        let info =
            Arc::new(GenerationInfo { model, prompts, n, output: request.output, share: entry.share() });
        Ok(Accepted { info, choices, permits, queued, unread, media: media.lease })
    }

    /// Constrains the answer to the calls that a request wants. The schemas of many tools cost CPU time, so they wait
    /// for a thread of the pool.
    async fn constrain(
        &self,
        mut request: GenerationRequest,
        model: &Arc<ServedModel>,
        share: Share,
    ) -> Result<GenerationRequest, Error> {
        let bytes = request.reading.as_ref().map_or(0, Reading::enforced_bytes);
        let model = model.clone();
        let constrain = move || reading::constrain(&mut request, &model).map(|()| request);
        if bytes <= IN_PLACE_BYTES {
            return constrain();
        }
        self.on_text(TextWork { lane: Lane::Parse, share, bytes }, constrain).await?
    }

    /// Checks a request's constraint, before the request holds anything that others wait for.
    async fn check_constraint(
        &self,
        request: &GenerationRequest,
        model: &ServedModel,
        name: &RequestName,
        share: Share,
    ) -> Result<(), Error> {
        let Some(constraint) = request.constraint.clone() else { return Ok(()) };
        // Dropped at the end of the check, as that of tokenising.
        let _span = name
            .trace
            .as_ref()
            .map(|trace| trace.child("check_constraint", SpanKind::Internal, SystemTime::now()));
        let began = Instant::now();
        let checked = self.constraints.check(constraint, model, share).await;
        self.metrics.constraint_checked(&checked, began.elapsed());
        checked.map(drop)
    }

    /// Returns, for each choice in order, the prompt's blocks and the request without its prompt.
    fn specs(
        &self,
        request: &GenerationRequest,
        common: &RequestParts,
        prompts: &[EncodedPrompt],
        model: &ServedModel,
    ) -> Result<Vec<(Arc<PromptBlocks>, pb::RequestSpec)>, Error> {
        let n = request.n.unwrap_or(1);
        let mut specs = Vec::with_capacity(prompts.len() * n as usize);
        for prompt in prompts {
            let of_prompt = of_prompt(request, common, prompt, model)?;
            let blocks = Arc::new(self.fleet.cut(model, prompt.ids.clone(), common.cache_salt));
            for choice in 0..n {
                specs.push((blocks.clone(), of_choice(&of_prompt, choice)));
            }
        }
        Ok(specs)
    }

    /// True if no generation is running.
    pub fn is_idle(&self) -> bool {
        self.permits.are_free()
    }

    /// Returns a request's number of choices, or an error if that number exceeds `max_choices`.
    fn count_choices(&self, prompts: usize, n: u32) -> Result<u32, Error> {
        let limit = self.max_choices;
        let choices = u32::try_from(prompts).ok().and_then(|prompts| prompts.checked_mul(n));
        choices.filter(|&choices| choices <= limit).ok_or_else(|| {
            let message = format!("{prompts} prompts times n = {n} is over the limit of {limit} choices");
            Error::invalid(if n > 1 { "n" } else { "prompt" }, message)
        })
    }

    /// Takes a permit for each of a request's choices, all or none.
    fn admit(&self, share: Share, choices: u32) -> Result<Permit, Error> {
        let limit = self.max_choices;
        self.permits.take(share, choices).map_err(|busy| {
            let message =
                format!("{busy} choices are running, this request has {choices}, the limit is {limit}");
            Error::overloaded(message, Duration::from_secs(1))
        })
    }
}

/// The parts of a request that all choices of one prompt share, without the prompt's tokens.
pub(super) fn of_prompt(
    request: &GenerationRequest,
    common: &RequestParts,
    prompt: &EncodedPrompt,
    model: &ServedModel,
) -> Result<RequestParts, Error> {
    let limits = model.description.request_limits();
    let mut parts = RequestParts { media: prompt.media.clone(), ..common.clone() };
    parts.stopping.max_tokens = validate::max_tokens(&request.stopping, prompt.ids.len(), limits.tokens)?;
    parts.stopping.check(&limits)?;
    if let Some(block) = prompt.block {
        // A chat of gRPC has a block of reasoning, too.
        let of_grpc = Reading::default();
        let reading = request.reading.as_ref().unwrap_or(&of_grpc);
        parts.thinking = reading.thinking(model, block, parts.constraint.is_some())?;
    }
    Ok(parts)
}

/// The request of one choice, without its prompt's tokens.
pub(super) fn of_choice(of_prompt: &RequestParts, choice: u32) -> pb::RequestSpec {
    let mut parts = of_prompt.clone();
    parts.sampling.seed = validate::choice_seed(parts.sampling.seed, choice);
    // Only the prompt's first choice asks for the prompt's logprobs; see `SharedLogprobs`.
    parts.prompt_logprobs = parts.prompt_logprobs.filter(|_| choice == 0);
    parts.into()
}

/// Limits the time until a request is accepted. The request may wait for a tokenising thread or for a conductor. Once
/// the request is accepted, the conductor enforces the deadline.
async fn within<T>(
    timeout: Option<Duration>,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let Some(timeout) = timeout else { return work.await };
    tokio::time::timeout(timeout, work).await.unwrap_or_else(|_| {
        let message = format!("the request was not accepted within {} ms", millis(timeout));
        Err(Error::new(ErrorKind::DeadlineExceeded, message))
    })
}

/// Maximum number of token ids that are checked on the async thread instead of in the text pool.
const CHECKED_IN_PLACE: usize = 64 << 10;

/// The pool's lane in which prompts are encoded. `None` for a few token ids, which only need to be checked.
fn lane(prompts: &[Prompt], echo: Option<Echo>) -> Option<Lane> {
    let ids = |prompt: &Prompt| if let Prompt::Tokens(ids) = prompt { Some(ids.len()) } else { None };
    match prompts.iter().map(ids).sum::<Option<usize>>() {
        Some(ids) if ids <= CHECKED_IN_PLACE && echo.is_none() => None,
        Some(_) => Some(Lane::Parse),
        None => Some(Lane::of_text(prompts.iter().map(Prompt::text_bytes).sum())),
    }
}

/// The settings of each choice, in order.
fn settings(
    request: &GenerationRequest,
    model: &ServedModel,
    prompts: &[EncodedPrompt],
    n: u32,
) -> Vec<ChoiceSettings> {
    let stopping = &request.stopping;
    let stops: Arc<[String]> = stopping.stop.clone().into();
    let own = if stopping.ignore_eos { &[][..] } else { &model.description.eos_token_ids };
    let ending_tokens: Arc<[u32]> = stopping.stop_token_ids.iter().chain(own).copied().collect();
    let special_tokens = SpecialTokens::included(request.output.keep_special_tokens);
    let unfinished = if request.output.echo { Unfinished::Shown } else { Unfinished::Hidden };
    let types = request.reading.as_ref().map(Reading::types);
    let parser = |prompt: &EncodedPrompt| {
        request.reading.as_ref()?.parser(model, types.clone()?, prompt.block.unwrap_or_default())
    };
    let of_choice = |index: u32| ChoiceSettings {
        index,
        detokenizer: model.text.tokenizer.clone().map(|tokenizer| {
            let prompt = &prompts[(index / n) as usize].ids;
            Detokenizer::after(prompt, tokenizer, special_tokens, unfinished)
        }),
        stops: stops.clone(),
        include_stop: stopping.include_stop,
        min_tokens: stopping.min_tokens,
        ending_tokens: ending_tokens.clone(),
        prompt_logprobs: request
            .output
            .prompt_logprobs_needed()
            .filter(|_| index.is_multiple_of(n))
            .map(|_| prompts[(index / n) as usize].ids.len() - 1),
        parser: parser(&prompts[(index / n) as usize]),
        tools: types.clone().unwrap_or_default(),
    };
    (0..prompts.len() as u32 * n).map(of_choice).collect()
}

#[cfg(test)]
mod tests;
