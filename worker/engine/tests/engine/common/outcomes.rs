//! Runs requests on an engine and collects their results as bits.

use std::collections::BTreeMap;

use tutti_engine::Engine;
use tutti_proto::cluster::v1::{self as pb, completion::Outcome};

/// All results of a request: prompt logprobs, then tokens. Logprobs are compared as bits, because `==` on floats treats
/// 0 and -0 as equal.
pub type RequestResults = Vec<(u32, Vec<(u32, u32)>)>;

/// Results of a run, by request.
#[derive(Default)]
pub struct Outcomes {
    pub results: BTreeMap<u64, RequestResults>,
    pub endings: BTreeMap<u64, Outcome>,
    /// The load after the last step.
    pub load: pb::WorkerLoad,
}

impl Outcomes {
    /// Returns the number of tokens that a finished request took from the prefix cache.
    pub fn cached(&self, request: u64) -> u32 {
        match &self.endings[&request] {
            Outcome::Finished(finished) => finished.cached_tokens,
            other => panic!("request {request}: {other:?}"),
        }
    }
}

fn bits(score: &pb::TokenLogprob) -> Vec<(u32, u32)> {
    let top = score.top.iter().map(|top| (top.token_id, top.logprob.to_bits()));
    std::iter::once((score.rank, score.logprob.to_bits())).chain(top).collect()
}

/// A token and its logprobs as bits.
pub fn token_bits(token: &pb::SampledToken) -> (u32, Vec<(u32, u32)>) {
    (token.token_id, token.logprob.as_ref().map(bits).unwrap_or_default())
}

/// Runs requests until each has ended. Asserts that no page and no slot is in use afterwards.
pub fn run(engine: &mut Engine, launches: &[pb::LaunchGraph]) -> Outcomes {
    let mut outcomes = Outcomes::default();
    for launch in launches {
        engine.launch(launch.clone());
    }
    while let Some(report) = engine.step().expect("the device is there") {
        for row in report.rows {
            let result = outcomes.results.entry(row.key.map_or(0, |key| key.request)).or_default();
            let run = row.prompt_logprobs.iter().flat_map(|run| (run.first..).zip(&run.tokens));
            result.extend(run.map(|(index, score)| (index, bits(score))));
            result.extend(row.tokens.iter().map(token_bits));
        }
        for completion in report.completions {
            let request = completion.key.map_or(0, |key| key.request);
            let ending = completion.outcome.expect("a completion has an outcome");
            assert!(outcomes.endings.insert(request, ending).is_none(), "two endings");
        }
    }
    outcomes.load = engine.load();
    assert_eq!((outcomes.load.kv_pages_used, outcomes.load.slots_used), (0, 0));
    assert_eq!(outcomes.endings.len(), launches.len());
    outcomes
}

/// Runs requests until each has finished.
pub fn run_to_end(engine: &mut Engine, launches: &[pb::LaunchGraph]) -> Outcomes {
    let outcomes = run(engine, launches);
    for ending in outcomes.endings.values() {
        assert!(matches!(ending, Outcome::Finished(_)), "{ending:?}");
    }
    outcomes
}
