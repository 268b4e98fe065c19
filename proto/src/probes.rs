//! Requests in which one parameter is at a bound or just beyond the bound, for the tests of every process that receives
//! requests.

use tutti_parameters::{
    BIAS, BIASES, LOGPROBS, LogitBias, NUMBERS, PRIORITY, PROMPT_LOGPROBS, STOP_TOKEN_IDS, SamplingNumber,
};

use crate::cluster::v1::{RequestSpec, SamplingParams, Stopping};

/// A request in which one parameter is at a bound or just beyond the bound.
#[derive(Clone, Debug)]
pub struct Probe {
    /// The parameter's name.
    pub parameter: &'static str,
    /// The request.
    pub spec: RequestSpec,
    /// Two texts that the refusal must contain: the value or the number of items, and the limit. `None` if the request
    /// is good.
    pub refused: Option<[String; 2]>,
}

/// Collects probes that each change one parameter of a good request.
struct Probes<'a> {
    good: &'a RequestSpec,
    probes: Vec<Probe>,
}

/// Returns probes of every parameter. `good` is a request that passes, with the largest `max_tokens` that fits. The
/// vocabulary must have more ids than a request may bias.
pub fn probes(good: &RequestSpec, vocab_size: u32) -> Vec<Probe> {
    let mut probes = Probes { good, probes: Vec::new() };
    NUMBERS.iter().for_each(|number| probes.number(number));
    probes.biases(vocab_size);
    probes.stopping(vocab_size);
    probes.rest(vocab_size);
    probes.probes
}

impl Probes<'_> {
    fn add(
        &mut self,
        parameter: &'static str,
        refused: Option<[String; 2]>,
        change: impl FnOnce(&mut RequestSpec, &mut SamplingParams, &mut Stopping),
    ) {
        let mut spec = self.good.clone();
        let (mut sampling, mut stopping) =
            (spec.sampling.take().unwrap_or_default(), spec.stopping.take().unwrap_or_default());
        change(&mut spec, &mut sampling, &mut stopping);
        (spec.sampling, spec.stopping) = (Some(sampling), Some(stopping));
        self.probes.push(Probe { parameter, spec, refused });
    }

    fn number(&mut self, number: &SamplingNumber) {
        let range = number.bounds.range;
        let (least, below) = match range.excludes_low {
            true => (range.low.next_up(), range.low),
            false => (range.low, range.low.next_down()),
        };
        for value in [least, range.high] {
            self.add(number.bounds.name, None, |_, sampling, _| (number.set)(sampling, value));
        }
        for value in [below, range.high.next_up(), f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let named = [value.to_string(), range.high.to_string()];
            self.add(number.bounds.name, Some(named), |_, sampling, _| (number.set)(sampling, value));
        }
    }

    fn biases(&mut self, vocab_size: u32) {
        let (name, most) = (BIASES.name, BIASES.range.most as u32);
        let many = |count: u32| (0..count).map(|id| LogitBias::from((id, 1.0))).collect();
        self.add(name, None, |_, sampling, _| sampling.logit_bias = many(most));
        let named = [(most + 1).to_string(), most.to_string()];
        self.add(name, Some(named), |_, sampling, _| sampling.logit_bias = many(most + 1));
        let (low, high) = (BIAS.range.low, BIAS.range.high);
        let mut one = |id: u32, value: f32, refused| {
            self.add(name, refused, |_, sampling, _| sampling.logit_bias = vec![(id, value).into()]);
        };
        one(vocab_size - 1, low, None);
        one(0, high, None);
        one(vocab_size, 1.0, Some([vocab_size.to_string(), vocab_size.to_string()]));
        for value in [low.next_down(), high.next_up(), f32::NAN] {
            one(0, value, Some([value.to_string(), high.to_string()]));
        }
        let twice = vec![(3, 1.0).into(), (3, 1.0).into()];
        let named = ["3".to_owned(), "twice".to_owned()];
        self.add(name, Some(named), |_, sampling, _| sampling.logit_bias = twice);
    }

    fn stopping(&mut self, vocab_size: u32) {
        let (name, most) = (STOP_TOKEN_IDS.name, STOP_TOKEN_IDS.range.most);
        let ids = |id: u32, count: usize| vec![id; count];
        self.add(name, None, |_, _, stopping| stopping.stop_token_ids = ids(vocab_size - 1, most));
        let named = [(most + 1).to_string(), most.to_string()];
        self.add(name, Some(named), |_, _, stopping| stopping.stop_token_ids = ids(0, most + 1));
        let named = [vocab_size.to_string(), vocab_size.to_string()];
        self.add(name, Some(named), |_, _, stopping| stopping.stop_token_ids = ids(vocab_size, 1));
        let most = self.good.stopping.as_ref().map_or(0, |stopping| stopping.max_tokens);
        self.add("min_tokens", None, |_, _, stopping| stopping.min_tokens = most);
        let named = [(most + 1).to_string(), most.to_string()];
        self.add("min_tokens", Some(named), |_, _, stopping| stopping.min_tokens = most + 1);
        let total = most as usize + self.good.prompt.len();
        for value in [most + 1, u32::MAX] {
            let named = [value.to_string(), total.to_string()];
            self.add("max_tokens", Some(named), |_, _, stopping| stopping.max_tokens = value);
        }
    }

    fn rest(&mut self, vocab_size: u32) {
        let most = LOGPROBS.range.high as u32;
        let over = || Some([(most + 1).to_string(), most.to_string()]);
        for (refused, value) in [(None, 0), (None, most), (over(), most + 1)] {
            self.add(LOGPROBS.name, refused.clone(), |spec, _, _| spec.logprobs = Some(value));
            self.add(PROMPT_LOGPROBS.name, refused, |spec, _, _| spec.prompt_logprobs = Some(value));
        }
        let (low, high) = (PRIORITY.range.low as i32, PRIORITY.range.high as i32);
        for value in [low, high] {
            self.add(PRIORITY.name, None, |spec, _, _| spec.priority = value);
        }
        for value in [low - 1, high + 1, i32::MIN] {
            let named = [value.to_string(), high.to_string()];
            self.add(PRIORITY.name, Some(named), |spec, _, _| spec.priority = value);
        }
        self.add("prompt", Some(["empty".to_owned(), "no tokens".to_owned()]), |spec, _, _| {
            spec.prompt.clear();
        });
        let named = [vocab_size.to_string(), vocab_size.to_string()];
        self.add("prompt", Some(named), |spec, _, _| spec.prompt[0] = vocab_size);
    }
}
