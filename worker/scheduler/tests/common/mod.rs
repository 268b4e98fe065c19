//! Fixtures: the walks of a model, and launches that use them.
#![allow(dead_code, reason = "each test binary uses some of these")]

use std::time::Duration;

use tutti_proto::{
    CacheSalt, GraphId, GraphKey, Incarnation, RequestId,
    declaration::{ModelDeclaration, NodeId, Walk, WalkId, WalkKind},
};
use tutti_scheduler::{
    Content, GraphLaunch, GraphRole, Row, RowCommit, RowOutcome, Scheduler, SchedulerConfig, Segment,
    StepPlan, Stopping,
};
use tutti_settings::{EngineSettings, PrefillSharing};

pub const TEXT: WalkId = WalkId(0);
pub const AUDIO: WalkId = WalkId(1);
pub const DECODE: WalkId = WalkId(2);
pub const MIXED: WalkId = WalkId(3);
/// The walks of a second partition. Rows of the second partition never share a step with rows of the first.
pub const SPEECH: WalkId = WalkId(4);
pub const SPEECH_DECODE: WalkId = WalkId(5);
pub const SPEECH_MIXED: WalkId = WalkId(6);

pub const EOS: u32 = 1;
pub const STOP: u32 = 2;
/// A token that does not end the output.
pub const WORD: u32 = 3;

pub fn model() -> ModelDeclaration {
    let walk = |name: &str, kind| Walk { name: name.into(), nodes: vec![NodeId(0)], kind };
    let walks = vec![
        walk("prefill_text", WalkKind::Chunkable { batched_by: MIXED }),
        walk("prefill_audio", WalkKind::Atomic { batched_by: MIXED }),
        walk("thinker_decode", WalkKind::Decode { batched_by: MIXED }),
        walk("thinker_step", WalkKind::Mixed),
        walk("prefill_speech", WalkKind::Chunkable { batched_by: SPEECH_MIXED }),
        walk("talker_decode", WalkKind::Decode { batched_by: SPEECH_MIXED }),
        walk("talker_step", WalkKind::Mixed),
    ];
    ModelDeclaration::new(vec!["thinker".into()], walks, vec![]).expect("these walks are consistent")
}

pub fn config() -> SchedulerConfig {
    SchedulerConfig {
        settings: EngineSettings {
            max_step_tokens: 16,
            prefill_sharing: PrefillSharing::FirstCome,
            max_running_requests: Some(8),
            ..EngineSettings::default()
        },
        max_waiting_requests: 64,
        max_context: 4096,
        page_tokens: 4,
        pages: 257,
        slots: 9,
        steps_in_flight: 1,
    }
}

/// Returns `config` with changed settings.
pub fn set(mut config: SchedulerConfig, change: impl FnOnce(&mut EngineSettings)) -> SchedulerConfig {
    change(&mut config.settings);
    config
}

pub fn scheduler(config: SchedulerConfig) -> Scheduler {
    Scheduler::new(config, &model()).expect("something can run")
}

pub fn key(request: u64) -> GraphKey {
    GraphKey { request: RequestId(request), incarnation: Incarnation(0), graph: GraphId(0) }
}

/// A launch of a text prompt that ignores end-of-sequence ids.
pub fn text(request: u64, prompt: usize, max_tokens: u32) -> GraphLaunch {
    segments(request, &[(TEXT, prompt)], max_tokens)
}

pub fn segments(request: u64, prefill: &[(WalkId, usize)], max_tokens: u32) -> GraphLaunch {
    GraphLaunch {
        key: key(request),
        role: GraphRole::Whole,
        prefill: prefill.iter().map(|&(walk, tokens)| Segment { walk, tokens }).collect(),
        decode: Some(DECODE),
        generated: 0,
        stopping: Stopping::new(max_tokens, 0, &[], &[]),
        content: None,
        priority: 0,
        share: 0,
        is_masked: false,
        awaits_mask: false,
        awaits_media: false,
        prefill_is_whole: false,
        deadline: None,
    }
}

/// Returns a launch of a text prompt with its tokens, so that its pages can be shared.
pub fn tokens(request: u64, prompt: &[u32], max_tokens: u32) -> GraphLaunch {
    let content = Content {
        tokens: prompt.to_vec().into(),
        media: vec![],
        salt: CacheSalt::default(),
        may_reuse: true,
    };
    GraphLaunch { content: Some(content), ..text(request, prompt.len(), max_tokens) }
}

/// Commits a step in which every sampled token is a word.
pub fn commit(scheduler: &mut Scheduler, step: StepPlan) -> Vec<RowCommit> {
    let outcomes = words(&step);
    scheduler.commit(step, outcomes, Duration::ZERO)
}

/// The outcomes of a successful step in which every sampled token is a word.
pub fn words(step: &StepPlan) -> Vec<RowOutcome> {
    step.rows.iter().map(word).collect()
}

pub fn word(row: &Row) -> RowOutcome {
    if row.is_terminal() { RowOutcome::Sampled(WORD) } else { RowOutcome::Computed }
}
