//! Measures the cost of a step's plan in a TP group: the bytes of the messages to the followers, and the host time that
//! the leader spends on these messages.
//!
//! `cargo bench -p tutti-models --bench lockstep`. The requests share the pages of a prefix, decode one token per step,
//! and gain a page every 16 steps. The model and the transport do nothing, so that only the plans cost time.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a bench ends at its first error and prints its result"
)]

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tutti_kernels::{
    DeviceError, PageId, RowInputs, SampleRow, SamplingParams, SlotId, StepInputs,
    collective::{Collective, CollectiveError, GroupRank, Patience},
};
use tutti_models::{
    EmbeddedRows, Limits, LogitRequests, LogitResults, Model, PageLayout,
    lockstep::{Leader, follow},
};
use tutti_proto::declaration::ModelDeclaration;

const PAGE_TOKENS: usize = 16;
const STEPS: usize = 200;
/// The sizes to measure: the number of requests, and the tokens of the prefix that the requests share.
const SIZES: [(usize, usize); 3] = [(16, 8192), (256, 8192), (1000, 8192)];
/// Goal for a step of 1,000 rows that share a prefix of 8,192 tokens: maximum bytes of the step's messages, and maximum
/// host time of the leader.
const GOAL: (usize, Duration) = (50_000, Duration::from_micros(300));

fn main() {
    println!(
        "rows  prefix  message bytes  leader us  follower us   (a decode step; medians, goal {GOAL:?} at 1000 rows)"
    );
    for (rows, prefix) in SIZES {
        let Measured { first, bytes, leader, follower } = measure(rows, prefix);
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        println!(
            "{rows:4}  {prefix:6}  {bytes:13}  {:9.0}  {:11.0}   (first step: {first} bytes)",
            us(leader),
            us(follower)
        );
    }
}

struct Measured {
    /// Bytes of the first step's messages, which carry whole block tables.
    first: usize,
    /// Maximum bytes of a later step's messages.
    bytes: usize,
    leader: Duration,
    follower: Duration,
}

fn measure(rows: usize, prefix: usize) -> Measured {
    let sent: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
    let mut leader = Leader::new(Box::new(Idle::new()), Box::new(Recorder(Arc::clone(&sent))));
    let shared: Vec<PageId> = (1..=prefix / PAGE_TOKENS).map(|page| PageId(page as u32)).collect();
    let mut next_page = shared.len() as u32 + 1;
    let mut tables: Vec<Vec<PageId>> = vec![shared; rows];
    leader.allocate_planes(1 << 22, rows + 1).unwrap();
    let params = params();
    let (mut first, mut bytes, mut times) = (0, 0, Vec::new());
    for step in 0..STEPS {
        let position = prefix + step;
        for (index, table) in tables.iter_mut().enumerate() {
            // The requests gain their pages in different steps, as requests of different lengths do.
            if step == 0 || (position + index).is_multiple_of(PAGE_TOKENS) {
                table.push(PageId(next_page));
                next_page += 1;
            }
        }
        let token_ids: Vec<u32> = (0..rows).map(|row| (row * 149 + step) as u32 % 150_000).collect();
        let positions = vec![position as f32; rows];
        let logit_rows: Vec<usize> = (0..rows).collect();
        let inputs: Vec<RowInputs<'_>> = tables
            .iter()
            .enumerate()
            .map(|(index, table)| RowInputs {
                first_token: index,
                tokens: 1,
                start: position,
                slot: SlotId(index as u32 + 1),
                continues: false,
                block_table: table,
            })
            .collect();
        let sample: Vec<(usize, SampleRow<'_>)> =
            (0..rows).map(|index| (index, sample_row(&params))).collect();
        let inputs = StepInputs {
            token_ids: &token_ids,
            positions: [&positions; 3],
            rows: &inputs,
            copies: &[],
            logit_rows: &logit_rows,
            shape: None,
        };
        let before = sent.lock().unwrap().len();
        let began = Instant::now();
        leader.forward(&inputs, &[]).unwrap();
        leader.enqueue_logits(&LogitRequests { sample: &sample, score: &[] }).unwrap();
        times.push(began.elapsed());
        let messages: usize = sent.lock().unwrap()[before..].iter().map(Vec::len).sum();
        if step == 0 {
            first = messages;
        } else {
            bytes = bytes.max(messages);
        }
    }
    drop(leader);
    let messages = std::mem::take(&mut *sent.lock().unwrap());
    // The first message allocates the planes, and the next two belong to the first step. The follower runs all
    // messages, but only the steps after the first are timed.
    let mut replay = Replay { messages: messages.into(), times: Vec::new(), since: Instant::now() };
    follow(&mut Idle::new(), &mut replay, &mut (), |_| {}).unwrap();
    let pairs: Vec<Duration> = replay.times[3..].chunks_exact(2).map(|pair| pair[0] + pair[1]).collect();
    Measured { first, bytes, leader: median(times.split_off(1)), follower: median(pairs) }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn params() -> SamplingParams {
    SamplingParams::GREEDY
}

fn sample_row(params: &SamplingParams) -> SampleRow<'_> {
    SampleRow { params, prompt: &[], output: &[], forbidden: &[], allowed: None, position: 0, logprobs: None }
}

/// A model whose steps take no time.
struct Idle {
    declaration: ModelDeclaration,
    limits: Limits,
}

impl Idle {
    fn new() -> Self {
        Self {
            declaration: ModelDeclaration::new(vec![], vec![], vec![]).unwrap(),
            limits: Limits {
                vocab_size: 150_000,
                max_context_tokens: 1 << 20,
                eos_token_ids: vec![],
                max_step_tokens: 1 << 20,
                steps_in_flight: 1,
            },
        }
    }
}

impl Model for Idle {
    fn declaration(&self) -> &ModelDeclaration {
        &self.declaration
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn describe(&self) -> String {
        "idle".into()
    }

    fn device_name(&self) -> String {
        "none".into()
    }

    fn weight_bytes(&self) -> u64 {
        0
    }

    fn step_bytes(&self) -> u64 {
        0
    }

    fn page_bytes(&self) -> usize {
        0
    }

    fn allocate_planes(&mut self, _: usize, _: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    fn page_layout(&self) -> PageLayout {
        PageLayout::default()
    }

    fn read_pages(&mut self, _: &[PageId], _: &mut Vec<u8>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn write_pages(&mut self, _: &[PageId], _: &[u8]) -> Result<(), DeviceError> {
        Ok(())
    }

    fn forward(&mut self, inputs: &StepInputs<'_>, _: &[EmbeddedRows<'_>]) -> Result<(), DeviceError> {
        std::hint::black_box(inputs);
        Ok(())
    }

    fn enqueue_logits(&mut self, _: &LogitRequests<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn collect(&mut self, _: Option<Instant>, _: &mut LogitResults) -> Result<bool, DeviceError> {
        Ok(true)
    }

    fn follow_logits(&mut self, _: &tutti_models::WantedRows) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// Rank 0's end of a transport that records every message.
struct Recorder(Arc<Mutex<Vec<Vec<u8>>>>);

/// Rank 1's end of a transport that replays recorded messages.
struct Replay {
    messages: std::collections::VecDeque<Vec<u8>>,
    /// Time from each message to the next.
    times: Vec<Duration>,
    since: Instant,
}

fn unused() -> CollectiveError {
    CollectiveError::Misuse("the bench makes no such call".into())
}

macro_rules! collective {
    ($type:ty, $rank:literal, $broadcast:expr) => {
        impl Collective for $type {
            fn group_rank(&self) -> GroupRank {
                GroupRank { rank: $rank, world_size: 2 }
            }

            fn transport(&self) -> &'static str {
                "none"
            }

            fn all_reduce(&mut self, _: &mut [f32]) -> Result<(), CollectiveError> {
                Err(unused())
            }

            fn gather(&mut self, _: &[f32], _: Option<&mut [f32]>) -> Result<(), CollectiveError> {
                Err(unused())
            }

            fn gather_bytes(&mut self, _: &[u8], _: Option<&mut [u8]>) -> Result<(), CollectiveError> {
                Err(unused())
            }

            fn scatter_bytes(&mut self, _: Option<&[u8]>, _: &mut [u8]) -> Result<(), CollectiveError> {
                Err(unused())
            }

            /// Returns this rank's bytes twice, because both ranks send the same bytes.
            fn all_gather(&mut self, part: &[u8], out: &mut Vec<u8>) -> Result<(), CollectiveError> {
                *out = part.repeat(2);
                Ok(())
            }

            fn broadcast(&mut self, message: &mut Vec<u8>, _: Patience) -> Result<(), CollectiveError> {
                $broadcast(self, message)
            }
        }
    };
}

collective!(Recorder, 0, |own: &mut Recorder, message: &mut Vec<u8>| {
    own.0.lock().unwrap().push(message.clone());
    Ok(())
});

collective!(Replay, 1, |own: &mut Replay, message: &mut Vec<u8>| {
    let now = Instant::now();
    own.times.push(now - own.since);
    *message = own.messages.pop_front().ok_or(CollectiveError::Left { rank: 0, size: 2 })?;
    own.since = Instant::now();
    Ok(())
});
