//! Starts generations: admission, checks, tokenising, and one `Submit` a choice.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::try_join_all;
use parking_lot::RwLock;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::transport::Channel;
use tracing::Instrument;
use tutti_proto::{
    MAX_MESSAGE_BYTES,
    cluster::v1::{
        self as pb, CheckpointFile, DescribeRequest, ModelDescription, ReadCheckpointFileRequest,
        SubmitRequest, conductor_client::ConductorClient,
    },
};
use tutti_runtime::{Error, ErrorKind, health::State};

use super::{
    choice::{Choice, ChoiceSettings},
    prompts::{self, Echo, EncodedPrompt},
    request::GenerationRequest,
    stream::{Accepted, ChoiceStream, Generation},
    validate,
};
use crate::{
    config::RouterConfig,
    metrics::{RequestMeter, RouterMetrics},
    served::ServedModel,
    text::{detokenizer::Detokenizer, pool::TextPool},
};

/// The largest text file taken from a conductor: a guard against a runaway stream, far above real tokenizers.
const MAX_FILE_BYTES: usize = 256 << 20;

/// What both surfaces share: the way to the conductor, what is served, and the bounds on what is under way.
pub struct Generator {
    client: ConductorClient<Channel>,
    served: RwLock<Option<Arc<ServedModel>>>,
    pool: TextPool,
    places: Arc<Semaphore>,
    max_choices: u32,
    skip_tokenizer_init: bool,
    metrics: RouterMetrics,
}

impl Generator {
    /// A generator with nothing served yet.
    pub fn new(channel: Channel, config: &RouterConfig, metrics: RouterMetrics) -> Self {
        let client = ConductorClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        Self {
            client,
            served: RwLock::new(None),
            pool: TextPool::new(config.tokenizer_threads, config.tokenizer_queue),
            places: Arc::new(Semaphore::new(config.max_concurrent_choices as usize)),
            max_choices: config.max_concurrent_choices,
            skip_tokenizer_init: config.skip_tokenizer_init,
            metrics,
        }
    }

    /// The metrics of this front door.
    pub fn metrics(&self) -> &RouterMetrics {
        &self.metrics
    }

    /// Whether text is off.
    pub fn skip_tokenizer_init(&self) -> bool {
        self.skip_tokenizer_init
    }

    /// What is served, once it is known.
    pub fn served(&self) -> Option<Arc<ServedModel>> {
        self.served.read().clone()
    }

    /// What is served, or the error that says it is not known yet.
    pub fn model(&self) -> Result<Arc<ServedModel>, Error> {
        self.served().ok_or_else(|| Error::unavailable("not ready: what is served is not known yet"))
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

    /// Serves this model from now on; requests under way keep theirs.
    pub fn publish(&self, model: ServedModel) {
        let name = &model.description.served_name;
        let (tokenizer, template) = (model.text.tokenizer.is_some(), model.text.template.is_some());
        tracing::info!(%name, tokenizer, chat_template = template, "the front door knows its model");
        *self.served.write() = Some(Arc::new(model));
    }

    /// What the conductor serves, and whether it can take requests, or why not.
    pub async fn describe(&self) -> Result<(ModelDescription, State), Error> {
        let answer = self.client.clone().describe(DescribeRequest {}).await?.into_inner();
        let model = answer.model.ok_or_else(|| Error::internal("the conductor describes no model"))?;
        Ok((model, if answer.ready { State::Ok } else { State::Not(answer.reason) }))
    }

    /// One of the checkpoint's text files.
    pub async fn read_file(&self, file: CheckpointFile) -> Result<Vec<u8>, Error> {
        let request = ReadCheckpointFileRequest { file: file.into() };
        let mut pieces = self.client.clone().read_checkpoint_file(request).await?.into_inner();
        let mut bytes = Vec::new();
        while let Some(piece) = pieces.message().await? {
            bytes.extend_from_slice(&piece.data);
            if bytes.len() > MAX_FILE_BYTES {
                let message = format!("{} is over {MAX_FILE_BYTES} bytes", file.as_str_name());
                return Err(Error::internal(message));
            }
        }
        Ok(bytes)
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
        let places = self.admit(request.prompts.len(), n)?;

        let echo =
            request.output.echo.then_some(Echo { keep_special_tokens: request.output.keep_special_tokens });
        let prompts = std::mem::take(&mut request.prompts);
        let prompts = {
            let model = model.clone();
            self.on_text(move || prompts::encode(prompts, &model, echo)).await??
        };
        let specs = specs(&request, sampling, &prompts, n, model.token_limit())?;
        let settings = settings(&request, &model, &prompts, n);
        // What tokenising took is gone from the client's time; none left is for the conductor to say.
        let timeout_ms = request.timeout.map(|timeout| millis(timeout.saturating_sub(arrived.elapsed())));
        let started = specs.into_iter().zip(settings).map(|(spec, settings)| {
            let submit = SubmitRequest { spec: Some(spec), timeout_ms };
            let mut client = self.client.clone();
            async move {
                let events = client.submit(submit).await?.into_inner();
                Ok::<_, Error>(ChoiceStream::new(Choice::new(settings), events))
            }
        });
        let choices = try_join_all(started).await?;
        Ok(Accepted { model, prompts, n, output: request.output, choices, places })
    }

    /// Completes once no generation is under way; until then, no new one is admitted.
    pub async fn idle(&self) {
        // All places at once are free only then. The semaphore is never closed, which would mean the same.
        let _ = self.places.acquire_many(self.max_choices).await;
    }

    /// Takes the places of a request's choices, all or none.
    fn admit(&self, prompts: usize, n: u32) -> Result<OwnedSemaphorePermit, Error> {
        let limit = self.max_choices;
        let choices = u32::try_from(prompts).ok().and_then(|prompts| prompts.checked_mul(n));
        let Some(choices) = choices.filter(|&choices| choices <= limit) else {
            let message = format!("{prompts} prompts times n = {n} is over the limit of {limit} choices");
            return Err(Error::invalid(if n > 1 { "n" } else { "prompt" }, message));
        };
        self.places.clone().try_acquire_many_owned(choices).map_err(|_| {
            let busy = limit as usize - self.places.available_permits().min(limit as usize);
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
fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)
}

/// The conductor's request for each choice, in order.
fn specs(
    request: &GenerationRequest,
    sampling: pb::Sampling,
    prompts: &[EncodedPrompt],
    n: u32,
    limit: (u32, &str),
) -> Result<Vec<pb::RequestSpec>, Error> {
    let mut specs = Vec::with_capacity(prompts.len() * n as usize);
    for prompt in prompts {
        let max_tokens = validate::max_tokens(&request.stopping, prompt.ids.len(), limit)?;
        for choice in 0..n {
            let seed = validate::choice_seed(sampling.seed, choice);
            specs.push(pb::RequestSpec {
                prompt: prompt.ids.to_vec(),
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
            });
        }
    }
    Ok(specs)
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
mod tests {
    use super::*;

    #[tokio::test]
    async fn whatever_a_request_waits_for_its_time_ends() {
        let waits = std::future::pending::<Result<(), Error>>();
        let error = within(Some(Duration::from_millis(1)), waits).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
        assert_eq!(error.message(), "the request was not accepted within 1 ms");
        assert_eq!(within(None, async { Ok(7) }).await, Ok(7));
    }
}
