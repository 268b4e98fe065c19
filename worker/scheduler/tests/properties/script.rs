//! The script of one simulation, which is chosen before the simulation runs.

use std::time::Duration;

use proptest::{collection::vec, prelude::*};
use tutti_proto::{CacheSalt, declaration::WalkId};
use tutti_scheduler::{Content, GraphLaunch, GraphRole, SchedulerConfig, Segment, ShareId, Stopping};
use tutti_settings::{Admission, Chunking, EngineSettings, PrefillSharing};

use crate::{
    common::{AUDIO, DECODE, EOS, SPEECH, SPEECH_DECODE, STOP, TEXT, key},
    masks::{LONGEST_MASK, Masked},
    model::{Model, model},
};

/// The events of one simulation. `fate_seed` seeds the generator that decides events during the run.
#[derive(Clone, Debug)]
pub struct Script {
    pub model: Model,
    pub config: SchedulerConfig,
    /// Maximum number of steps that stay in flight at the end of a turn. It is at most `steps_in_flight`. If the two
    /// are equal, some turns begin with the maximum number of steps in flight.
    pub depth: usize,
    pub requests: Vec<Arrival>,
    pub fate_seed: u64,
    /// Percentage of steps that the device refuses.
    pub aborts: u64,
    /// Percentage of rows that fail.
    pub failures: u64,
}

#[derive(Clone, Debug)]
pub struct Arrival {
    pub turn: usize,
    /// The turn of the cancel, which may precede the arrival.
    pub cancel: Option<usize>,
    pub deadline: Option<usize>,
    pub priority: i32,
    pub share: ShareId,
    pub prefill: Vec<(WalkId, usize)>,
    pub generated: u32,
    pub max_tokens: u32,
    pub min_tokens: u32,
    pub stops: bool,
    /// Number that selects the common start of prompts. A prompt begins with the first `alike` tokens of its family.
    pub family: u32,
    pub alike: usize,
    pub shares: bool,
    pub may_reuse: bool,
    pub role: GraphRole,
    /// Number of turns that the transfer of the planes from or to another worker takes.
    pub away: usize,
    /// True if the transfer fails.
    pub fails: bool,
    /// Number of turns until the embeddings of the media arrive. `None` without media.
    pub media: Option<usize>,
    /// `None` if the output follows no constraint.
    pub masked: Option<Masked>,
}

impl Arrival {
    pub fn launch(&self, request: u64) -> GraphLaunch {
        let ends: (&[u32], &[u32]) = if self.stops { (&[EOS], &[STOP]) } else { (&[], &[]) };
        let content = Content {
            tokens: self.tokens(request).into(),
            media: vec![],
            salt: CacheSalt::default(),
            may_reuse: self.may_reuse,
        };
        GraphLaunch {
            key: key(request),
            role: self.role,
            prefill: self.prefill.iter().map(|&(walk, tokens)| Segment { walk, tokens }).collect(),
            decode: (self.role != GraphRole::Prefill).then(|| self.decode()),
            generated: self.generated,
            stopping: Stopping::new(self.max_tokens, self.min_tokens, ends.0, ends.1),
            content: self.shares.then_some(content),
            priority: self.priority,
            share: self.share,
            is_masked: self.masked.is_some(),
            awaits_mask: self.masked.is_some_and(|masked| masked.first > 0),
            awaits_media: self.media.is_some(),
            prefill_is_whole: false,
            deadline: self.deadline.map(|turn| Duration::from_millis(turn as u64)),
        }
    }

    pub fn tokens(&self, request: u64) -> Vec<u32> {
        let own = |index| 1_000_000 + request as u32 * 100_000 + index;
        let token = |index: usize| {
            if index < self.alike { self.family * 100_000 + index as u32 } else { own(index as u32) }
        };
        (0..self.prefill_tokens()).map(token).collect()
    }

    /// The decode walk of the prefill's partition.
    pub fn decode(&self) -> WalkId {
        if self.prefill[0].0 == SPEECH { SPEECH_DECODE } else { DECODE }
    }

    pub fn prefill_tokens(&self) -> usize {
        self.prefill.iter().map(|segment| segment.1).sum()
    }

    pub fn prompt_tokens(&self) -> usize {
        self.prefill_tokens() - self.generated as usize
    }

    /// Maximum number of tokens for which the request holds pages.
    pub fn max_held(&self) -> usize {
        if self.role == GraphRole::Prefill { self.prefill_tokens() } else { self.max_total() }
    }

    pub fn max_total(&self) -> usize {
        self.prompt_tokens() + self.max_tokens.max(self.generated) as usize
    }
}

fn arrival(longest: usize) -> impl Strategy<Value = Arrival> {
    let thinker = vec((prop_oneof![3 => Just(TEXT), 1 => Just(AUDIO)], 1_usize..longest), 1..4);
    let talker = vec((Just(SPEECH), 1_usize..longest), 1..3);
    let prefill = prop_oneof![3 => thinker, 2 => talker];
    let max_tokens = prop_oneof![3 => 0_u32..12, 2 => 12_u32..150];
    let output = (max_tokens, 0_u32..4, 0_u32..4, any::<bool>());
    let weighted = proptest::option::weighted;
    let when = (0_usize..60, weighted(0.2, 0_usize..90), weighted(0.1, 0_usize..200), -2..3_i32);
    let content =
        (0_u32..2, 0_usize..longest * 3, proptest::bool::weighted(0.75), proptest::bool::weighted(0.8));
    let role =
        prop_oneof![3 => Just(GraphRole::Whole), 1 => Just(GraphRole::Prefill), 1 => Just(GraphRole::Decode)];
    let media = proptest::option::weighted(0.2, 0_usize..30);
    let mask = (any::<bool>(), prop_oneof![Just(0), 1..=LONGEST_MASK]);
    let mask = mask.prop_map(|(runs_ahead, first)| Masked { runs_ahead, first });
    let masked = proptest::option::weighted(0.3, mask);
    let role = (role, 0_usize..30, proptest::bool::weighted(0.15), media, masked);
    let share = prop_oneof![2 => Just(0_u64), 1 => 1_u64..4];
    (when, prefill, output, content, (role, share)).prop_map(
        |(
            when,
            mut prefill,
            output,
            (family, alike, shares, may_reuse),
            ((role, away, fails, media, masked), share),
        )| {
            let (turn, cancel, deadline, priority) = when;
            let (max_tokens, min_tokens, generated, stops) = output;
            if role == GraphRole::Decode {
                // This worker computes the prefill only after a preemption, and then as a single segment.
                let walk = if prefill[0].0 == SPEECH { SPEECH } else { TEXT };
                prefill = vec![(walk, prefill.iter().map(|segment| segment.1).sum())];
            }
            let tokens: usize = prefill.iter().map(|segment| segment.1).sum();
            let generated = generated.min(tokens as u32 - 1).min(max_tokens);
            Arrival {
                turn,
                cancel,
                deadline,
                priority,
                share,
                prefill,
                generated,
                max_tokens,
                min_tokens,
                stops,
                family,
                alike,
                shares,
                may_reuse,
                role,
                away,
                fails,
                media: media.filter(|_| role != GraphRole::Decode),
                masked,
            }
        },
    )
}

fn policies() -> impl Strategy<Value = SchedulerConfig> {
    let chunking = prop_oneof![4 => Just(Chunking::Scheduler), 1 => Just(Chunking::Off)];
    let sharing = prop_oneof![
        Just(PrefillSharing::ShortestFirst),
        Just(PrefillSharing::Fair),
        Just(PrefillSharing::FirstCome)
    ];
    let admission = prop_oneof![2 => Just(Admission::WholeLife), 3 => Just(Admission::Optimistic)];
    let target = proptest::option::of(1_u32..5);
    let caps = (proptest::option::of(1_usize..24), proptest::option::of(1_usize..24));
    (chunking, sharing, admission, target, caps, any::<bool>()).prop_map(
        |(chunking, prefill_sharing, admission, target_itl_ms, caps, prefix_cache)| {
            let (max_prefill_chunk_size, long_prefill_token_threshold) = caps;
            let config = crate::common::config();
            let settings = EngineSettings {
                chunking,
                prefill_sharing,
                admission,
                target_itl_ms,
                max_prefill_chunk_size,
                long_prefill_token_threshold,
                no_prefix_cache: !prefix_cache,
                ..config.settings
            };
            SchedulerConfig { settings, ..config }
        },
    )
}

/// A configuration, a model, and the length of the longest segment.
type Setting = (SchedulerConfig, Model, usize);

/// Short prompts in small pools. Most faults show there.
fn tight() -> impl Strategy<Value = Setting> {
    let planes = prop_oneof![
        4 => (1_usize..9, model(&[1])),
        1 => (1_usize..3, model(&[1, 4])).prop_map(|(pages, model)| (pages * 4, model)),
    ];
    // Budgets below the number of running requests are as likely as larger ones.
    let budget = prop_oneof![1_usize..8, 1_usize..48];
    let pages = prop_oneof![2_usize..40, 2_usize..120];
    (policies(), planes, budget, pages, 8_usize..300).prop_map(
        |(policies, (page_tokens, model), max_step_tokens, pages, max_context)| {
            let settings = EngineSettings { max_step_tokens, ..policies.settings };
            (SchedulerConfig { settings, max_context, page_tokens, pages, ..policies }, model, 40)
        },
    )
}

/// Many short prompts that outgrow their pool, so that requests are preempted over and over.
fn crowded() -> impl Strategy<Value = Setting> {
    // With large pages, a request runs for a long time until it needs another page.
    let pool = prop_oneof![(1_usize..6, 12_usize..60), (24_usize..40, 5_usize..14)];
    (policies(), model(&[1]), pool, 4_usize..40).prop_map(
        |(policies, model, (page_tokens, pages), max_step_tokens)| {
            // Only with the cache can a preempted request begin again after a cached prefix.
            let (admission, no_prefix_cache) = (Admission::Optimistic, false);
            let settings =
                EngineSettings { admission, max_step_tokens, no_prefix_cache, ..policies.settings };
            (SchedulerConfig { settings, max_context: 300, page_tokens, pages, ..policies }, model, 8)
        },
    )
}

/// Pages of 128 tokens, which compressed planes need.
fn compressed() -> impl Strategy<Value = Setting> {
    (policies(), model(&[1, 4, 128]), 40_usize..600, 2_usize..40).prop_map(
        |(policies, model, max_step_tokens, pages)| {
            let mut settings = EngineSettings { max_step_tokens, ..policies.settings };
            for cap in [&mut settings.max_prefill_chunk_size, &mut settings.long_prefill_token_threshold] {
                *cap = cap.map(|cap| cap * 20);
            }
            let config = SchedulerConfig { settings, max_context: 2000, page_tokens: 128, pages, ..policies };
            (config, model, 400)
        },
    )
}

/// Prompts of realistic lengths, up to 32k tokens.
fn roomy() -> impl Strategy<Value = Setting> {
    (policies(), model(&[1, 4]), 512_usize..8192, 1000_usize..6000).prop_map(
        |(policies, model, max_step_tokens, pages)| {
            let mut settings = policies.settings;
            settings.max_step_tokens = max_step_tokens;
            settings.max_running_requests = Some(8);
            for cap in [&mut settings.max_prefill_chunk_size, &mut settings.long_prefill_token_threshold] {
                *cap = cap.map(|cap| cap * 100);
            }
            let config =
                SchedulerConfig { settings, max_context: 33_000, page_tokens: 16, pages, ..policies };
            (config, model, 11_000)
        },
    )
}

/// Adds limits to a setting: a limit of running requests, a number of slots from too few to plenty, and a number of
/// steps in flight.
fn with_limits(setting: impl Strategy<Value = Setting>) -> impl Strategy<Value = Setting> {
    let spare = prop_oneof![Just(0_usize), 1_usize..4, 4_usize..40];
    let limits = (1_usize..10, 0_usize..24, proptest::bool::weighted(0.1), spare);
    let steps = prop_oneof![2 => Just(1_usize), 3 => Just(2), 1 => Just(3)];
    (setting, limits, steps).prop_map(|(setting, (running, waiting, few, spare), steps_in_flight)| {
        let (mut config, model, longest) = setting;
        config.settings.max_running_requests = Some(running);
        config.max_waiting_requests = waiting;
        config.slots = if few { 2 + spare.min(running) } else { 1 + running + spare };
        config.steps_in_flight = steps_in_flight;
        (config, model, longest)
    })
}

pub fn script() -> impl Strategy<Value = Script> {
    let setting = with_limits(prop_oneof![90 => tight(), 30 => crowded(), 10 => compressed(), 2 => roomy()]);
    let faults = (prop_oneof![Just(0_u64), 1_u64..30], prop_oneof![Just(0_u64), 1_u64..10]);
    let requests = setting.prop_flat_map(|(config, model, longest)| {
        let most = if longest > 40 { 10 } else { 24 };
        (Just((config, model)), vec(arrival(longest), 1..most))
    });
    (requests, 0_usize..4, any::<u64>(), faults).prop_map(
        |(((config, model), requests), depth, fate_seed, (aborts, failures))| Script {
            depth: depth.min(config.steps_in_flight),
            model,
            config,
            requests,
            fate_seed,
            aborts,
            failures,
        },
    )
}
