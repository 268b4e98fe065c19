//! Requests to sample, in the form that the kernels read.

use crate::cuda::records::{Record, Task};
use crate::cuda::step::Owner;
use crate::device::sampler_preconditions as check;
use crate::{DeviceError, SampleRow, TokenMask};

/// One request of a call to sample.
#[derive(Clone, Copy)]
pub(super) struct Request<'a> {
    /// Index of the row of logits, or of candidates.
    pub(super) index: usize,
    pub(super) row: SampleRow<'a>,
    pub(super) owner: Owner,
    /// Index of the result.
    result: u32,
    /// Index of the first of the request's likeliest tokens.
    first_top: u32,
    /// Number of likeliest tokens to return; `None` if no score is requested.
    tops: Option<usize>,
}

/// Returns the requests of a call, with the index of each result, and the length of each list of likeliest tokens.
pub(super) fn requests<'a>(
    rows: &[(usize, SampleRow<'a>)],
    vocabulary: usize,
    owner_of: impl Fn(usize) -> Owner,
) -> Result<(Vec<Request<'a>>, Vec<Option<usize>>), DeviceError> {
    let (mut requests, mut first_top) = (Vec::with_capacity(rows.len()), 0);
    for (result, &(index, row)) in (0..).zip(rows) {
        check::adjusted_tokens(&row, vocabulary)?;
        let tops = row.logprobs.map(|top| (top as usize).min(vocabulary));
        requests.push(Request { index, row, owner: owner_of(index), result, first_top, tops });
        first_top += tops.unwrap_or(0) as u32;
    }
    let tops = requests.iter().map(|request| request.tops).collect();
    Ok((requests, tops))
}

/// The lists of tokens that are sent with a launch's tasks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Lists {
    /// The lists of bias, forbidden tokens and penalties, and the masks.
    OfAdjustments,
    /// No lists, because the logits are already adjusted.
    Empty,
}

/// The masks of one launch. Rows with the same mask share its words.
#[derive(Default)]
pub(super) struct Masks<'a>(Vec<(&'a TokenMask, u32)>);

impl<'a> Masks<'a> {
    /// Returns the index of the mask's first word in `words`, to which it is appended if no row before has it. The
    /// index is above 0, because tasks stand before masks.
    pub(super) fn first_word(&mut self, mask: &'a TokenMask, words: &mut Vec<u32>) -> u32 {
        if let Some((_, first)) = self.0.iter().find(|(other, _)| other.shares_words(mask)) {
            return *first;
        }
        let first = words.len() as u32;
        words.extend_from_slice(mask.words());
        self.0.push((mask, first));
        first
    }
}

impl Request<'_> {
    /// True if a penalty depends on the tokens of the request.
    pub(super) fn penalises(&self) -> bool {
        let params = self.row.params;
        params.repetition_penalty != 1.0 || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0
    }

    /// Appends the request's lists of tokens to `words`, and returns the request's task.
    fn task<'a>(&'a self, words: &mut Vec<u32>, masks: &mut Masks<'a>, lists: Lists) -> Task {
        let (row, params) = (&self.row, self.row.params);
        let allowed = row.allowed.filter(|_| lists == Lists::OfAdjustments);
        let allowed = allowed.map_or(0, |mask| masks.first_word(mask, words));
        let mut list = |tokens: &[u32], wanted: bool| {
            let (first, tokens) = (words.len() as u32, if wanted { tokens } else { &[][..] });
            words.extend_from_slice(tokens);
            [first, tokens.len() as u32]
        };
        let adjusts = lists == Lists::OfAdjustments;
        let pairs: Vec<u32> =
            params.logit_bias.iter().flat_map(|bias| [bias.token_id, bias.bias.to_bits()]).collect();
        let [bias, bias_words] = list(&pairs, adjusts);
        let [forbidden, forbidden_count] = list(row.forbidden, adjusts);
        let [prompt, prompt_count] = list(row.prompt, adjusts && self.penalises());
        let [output, output_count] = list(row.output, adjusts && self.penalises());
        Task {
            seed: params.seed,
            position: row.position,
            row: self.index as u32,
            slot: self.owner.slot,
            continues: u32::from(self.owner.continues && self.penalises()),
            scores: u32::from(self.tops.is_some()),
            temperature: params.temperature,
            min_p: params.min_p,
            top_p: params.top_p,
            repetition: params.repetition_penalty,
            presence: params.presence_penalty,
            frequency: params.frequency_penalty,
            top_k: params.top_k,
            tops: self.tops.unwrap_or(0) as u32,
            first_top: self.first_top,
            bias,
            bias_count: bias_words / 2,
            forbidden,
            forbidden_count,
            prompt,
            prompt_count,
            output,
            output_count,
            adjusts: u32::from(row.adjusts()),
            result: self.result,
            allowed,
        }
    }
}

/// Returns the tasks of one launch, followed by their lists of tokens. A task refers to a list by the index of the
/// list's first word.
pub(super) fn words(requests: &[Request<'_>], lists: Lists) -> Vec<u32> {
    let mut words = vec![0; requests.len() * Task::WORDS];
    let mut masks = Masks::default();
    for (index, request) in requests.iter().enumerate() {
        let task = request.task(&mut words, &mut masks, lists);
        words[index * Task::WORDS..][..Task::WORDS].copy_from_slice(task.words());
    }
    words
}
