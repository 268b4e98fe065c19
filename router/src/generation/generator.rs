//! Starts generations: admission, checks, tokenising, and one `Submit` a choice.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::try_join_all;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::Instrument;
use tutti_proto::cluster::v1 as pb;
use tutti_runtime::{Error, ErrorKind};

use super::{
    attempts::{Attempts, Wanted},
    choice::{Choice, ChoiceSettings},
    prompts::{self, Echo, EncodedPrompt},
    request::GenerationRequest,
    stream::{Accepted, ChoiceStream, Generation},
    validate,
};
use crate::{
    config::RouterConfig,
    fleet::{Fleet, PromptBlocks},
    metrics::{RequestMeter, RouterMetrics},
    served::ServedModel,
    text::{detokenizer::Detokenizer, pool::TextPool},
};

/// What both surfaces share: the conductors, what they serve, and the bounds on what is under way.
pub struct Generator {
    fleet: Arc<Fleet>,
    pool: TextPool,
    permits: Arc<Semaphore>,
    max_choices: u32,
    metrics: RouterMetrics,
}

impl Generator {
    /// A generator before these conductors.
    pub fn new(fleet: Arc<Fleet>, config: &RouterConfig, metrics: RouterMetrics) -> Self {
        Self {
            fleet,
            pool: TextPool::new(config.tokenizer_threads, config.tokenizer_queue),
            permits: Arc::new(Semaphore::new(config.max_concurrent_choices as usize)),
            max_choices: config.max_concurrent_choices,
            metrics,
        }
    }

    /// The metrics of this front door.
    pub fn metrics(&self) -> &RouterMetrics {
        &self.metrics
    }

    /// The conductors.
    pub fn fleet(&self) -> &Arc<Fleet> {
        &self.fleet
    }

    /// What is served, or the error that says it is not known yet.
    pub fn model(&self) -> Result<Arc<ServedModel>, Error> {
        self.fleet.served().ok_or_else(|| Error::unavailable("not ready: what is served is not known yet"))
    }

    /// As [`Generator::model`], for a request that names one.
    pub fn model_named(&self, name: Option<&str>) -> Result<Arc<ServedModel>, Error> {
        let model = self.model()?;
        let served = &model.description.served_name;
        match name {
            Some(name) if name != served => {
                let message = format!("{name:?} is not served here; the model is {served:?}");
                Err(Error::new(ErrorKind::NotFound, message).with_field("model"))
            }
            _ => Ok(model),
        }
    }

    /// Runs CPU-bound work on text in the bounded pool.
    pub async fn on_text<T, F>(&self, work: F) -> Result<T, Error>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        self.pool.run(work).await
    }

    /// Starts a request: when this returns, the conductor has accepted all of its choices.
    pub async fn start(&self, request: GenerationRequest) -> Result<Generation, Error> {
        let mut meter = RequestMeter::start(&self.metrics);
        let span = meter.span().clone();
        match within(request.timeout, self.accept(request)).instrument(span).await {
            Ok(accepted) => Ok(Generation::new(accepted, meter)),
            Err(error) => {
                meter.refused(&error);
                Err(error)
            }
        }
    }

    async fn accept(&self, mut request: GenerationRequest) -> Result<Accepted, Error> {
        let arrived = Instant::now();
        let model = self.model_named(request.model.as_deref())?;
        let vocab_size = model.description.vocab_size;
        validate::check(&request, vocab_size, model.text.tokenizer.is_some())?;
        let sampling = validate::sampling(&request.sampling, &model.text.defaults, vocab_size)?;
        let n = request.n.unwrap_or(1);
        let permits = self.admit(request.prompts.len(), n)?;

        let echo =
            request.output.echo.then_some(Echo { keep_special_tokens: request.output.keep_special_tokens });
        let (prompts, media) = (std::mem::take(&mut request.prompts), std::mem::take(&mut request.media));
        let prompts = {
            let model = model.clone();
            self.on_text(move || prompts::encode(prompts, media, &model, echo)).await??
        };
        let specs = self.specs(&request, sampling, &prompts, n, &model)?;
        let settings = settings(&request, &model, &prompts, n);
        // What tokenising took is gone from the client's time; none left is for the conductor to say.
        let deadline = request.timeout.and_then(|timeout| arrived.checked_add(timeout));
        let started = specs.into_iter().zip(settings).map(|((prompt, spec), settings)| {
            let wanted = Wanted { model: model.clone(), prompt, spec, deadline };
            async {
                let attempts = Attempts::start(self.fleet.clone(), wanted).await?;
                Ok::<_, Error>(ChoiceStream::new(Choice::new(settings), attempts))
            }
        });
        let choices = try_join_all(started).await?;
        Ok(Accepted { model, prompts, n, output: request.output, choices, permits })
    }

    /// The conductor's request for each choice, in order: a prompt, and the rest.
    fn specs(
        &self,
        request: &GenerationRequest,
        sampling: pb::Sampling,
        prompts: &[EncodedPrompt],
        n: u32,
        model: &ServedModel,
    ) -> Result<Vec<(Arc<PromptBlocks>, pb::RequestSpec)>, Error> {
        let mut specs = Vec::with_capacity(prompts.len() * n as usize);
        for prompt in prompts {
            let max_tokens = validate::max_tokens(&request.stopping, prompt.ids.len(), model.token_limit())?;
            let blocks = Arc::new(self.fleet.cut(model, prompt.ids.clone()));
            for choice in 0..n {
                let seed = validate::choice_seed(sampling.seed, choice);
                let spec = pb::RequestSpec {
                    prompt: Vec::new(),
                    sampling: Some(pb::Sampling { seed, ..sampling.clone() }),
                    stopping: Some(pb::Stopping {
                        max_tokens,
                        min_tokens: request.stopping.min_tokens,
                        stop_token_ids: request.stopping.stop_token_ids.clone(),
                        ignore_eos: request.stopping.ignore_eos,
                    }),
                    logprobs: request.output.logprobs,
                    // The choices of a prompt would all bring the same ones, and each choice reports them.
                    prompt_logprobs: request.output.prompt_logprobs_needed(),
                    priority: request.priority,
                    media: prompt.media.clone(),
                };
                specs.push((blocks.clone(), spec));
            }
        }
        Ok(specs)
    }

    /// Completes once no generation is under way; until then, no new one is admitted.
    pub async fn idle(&self) {
        // All permits at once are free only then. The semaphore is never closed, which would mean the same.
        let _ = self.permits.acquire_many(self.max_choices).await;
    }

    /// Takes the permits of a request's choices, all or none.
    fn admit(&self, prompts: usize, n: u32) -> Result<OwnedSemaphorePermit, Error> {
        let limit = self.max_choices;
        let choices = u32::try_from(prompts).ok().and_then(|prompts| prompts.checked_mul(n));
        let Some(choices) = choices.filter(|&choices| choices <= limit) else {
            let message = format!("{prompts} prompts times n = {n} is over the limit of {limit} choices");
            return Err(Error::invalid(if n > 1 { "n" } else { "prompt" }, message));
        };
        self.permits.clone().try_acquire_many_owned(choices).map_err(|_| {
            let busy = limit as usize - self.permits.available_permits().min(limit as usize);
            let message =
                format!("{busy} choices are under way, this request has {choices}, the limit is {limit}");
            Error::overloaded(message, Duration::from_secs(1))
        })
    }
}

/// Ends the work on a request when its time is over, wherever it waits: for a thread that tokenises, or for a conductor
/// that does not answer. From its acceptance on, the conductor sees to it.
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

/// Milliseconds, rounded up so that a short time is not none.
pub(super) fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)
}

/// What each choice is told at its start, in order.
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
    let skip_special_tokens = !request.output.keep_special_tokens;
    let of_choice = |index: u32| ChoiceSettings {
        index,
        detokenizer: model.text.tokenizer.clone().map(|t| Detokenizer::new(t, skip_special_tokens)),
        stops: stops.clone(),
        include_stop: stopping.include_stop,
        min_tokens: stopping.min_tokens,
        ending_tokens: ending_tokens.clone(),
        prompt_logprobs: request
            .output
            .prompt_logprobs_needed()
            .map(|_| prompts[(index / n) as usize].ids.len() - 1),
    };
    (0..prompts.len() as u32 * n).map(of_choice).collect()
}

#[cfg(test)]
mod tests;
