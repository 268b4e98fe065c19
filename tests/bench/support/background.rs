//! Requests that decode in the background of a measurement.

use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

use tokio::{sync::watch, task::JoinHandle};
use tutti_load::client::Target;

use super::stream::prompts;

const STREAMS: usize = 4;
const PROMPT: usize = 512;
/// Number of tokens that each request asks for: more than it can generate during a run.
const MAX_TOKENS: u32 = 30_000;

/// Background requests.
pub struct Background(Vec<BackgroundRequest>);

struct BackgroundRequest {
    /// Arrival times of tokens.
    arrivals: Arc<Mutex<Vec<Instant>>>,
    task: JoinHandle<()>,
}

impl Background {
    /// Starts the requests and waits until all decode.
    pub async fn start(target: &Target) -> Result<Self, String> {
        let mut started = Vec::new();
        for prompt in prompts(STREAMS, PROMPT, 1000) {
            let arrivals = Arc::new(Mutex::new(Vec::new()));
            let (tell, mut first) = watch::channel(false);
            let (target, into) = (target.clone(), arrivals.clone());
            let task = tokio::spawn(async move {
                let watch = |record: &tutti_load::client::Record| {
                    if !record.arrivals.is_empty()
                        && let Ok(mut into) = into.lock()
                    {
                        into.push(Instant::now());
                        tell.send_replace(true);
                    }
                };
                target.generate_watched(&prompt, MAX_TOKENS, 0, watch).await;
            });
            first.wait_for(|decodes| *decodes).await.map_err(|_| "a request does not decode")?;
            started.push(BackgroundRequest { arrivals, task });
        }
        Ok(Self(started))
    }

    /// Ends the requests. Returns the milliseconds between tokens that arrived from `from` to `until`. Returns an error
    /// if a request ended by itself before.
    pub async fn stop(self, from: Instant, until: Instant) -> Result<Vec<f64>, String> {
        let mut gaps = Vec::new();
        for BackgroundRequest { arrivals, task } in self.0 {
            if task.is_finished() {
                return Err("a request stopped decoding".into());
            }
            task.abort();
            // Waiting for the aborted task ensures that its connection is closed. The result is the error that the task
            // was aborted.
            let _ = task.await;
            let arrivals = arrivals.lock().map_err(|_| "a client failed")?;
            let inside: Vec<_> = arrivals.iter().filter(|at| (from..until).contains(at)).collect();
            gaps.extend(inside.windows(2).map(|pair| (*pair[1] - *pair[0]).as_secs_f64() * 1e3));
        }
        Ok(gaps)
    }
}
