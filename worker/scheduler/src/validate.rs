//! Validation on arrival: turns a launch into a request that is certain to end, or refuses the launch.

use tutti_proto::{Epoch, declaration::WalkId};

use crate::{
    admission::Needs,
    config::SchedulerConfig,
    following::Following,
    launch::{GraphLaunch, GraphRole, Refusal},
    pages::PagePool,
    prefix::hash_of_first,
    request::{Cut, PrefillSegment, Request},
    walks::Walks,
};

/// Makes a request from a launch. Refuses a launch that could not run to its end even on an empty worker.
pub(crate) fn validate(
    launch: GraphLaunch,
    walks: &Walks,
    config: &SchedulerConfig,
    pool: &PagePool,
) -> Result<Request, Refusal> {
    let (prompt_tokens, max_tokens) = (launch.prompt_tokens(), launch.stopping.max_tokens());
    if prompt_tokens == 0 || launch.prefill.iter().any(|segment| segment.tokens == 0) {
        return Err(Refusal::EmptyPrompt);
    }
    let mut end = 0;
    let mut prefill = Vec::with_capacity(launch.prefill.len());
    for segment in &launch.prefill {
        end += segment.tokens;
        let walk = match (launch.role, launch.decode) {
            // Another worker computes the prefill. This worker computes the prefill only after a preemption, so the
            // walk is the one that recomputes tokens.
            (GraphRole::Decode, Some(decode)) => walks.recompute(decode),
            _ => segment.walk,
        };
        let cut = match walks.cut(walk)? {
            Cut::Anywhere if launch.prefill_is_whole => Cut::BeforeOnly,
            cut => cut,
        };
        prefill.push(PrefillSegment { walk, cut, end });
    }
    match launch.decode {
        Some(walk) if !walks.is_decode(walk) => return Err(Refusal::WrongWalk { walk, wanted: "a decode" }),
        None if launch.role != GraphRole::Prefill && max_tokens > launch.generated + 1 => {
            return Err(Refusal::NoDecodeWalk { max_tokens });
        }
        _ => {}
    }
    let tokens = launch.max_total_tokens();
    let max_context = config.max_context;
    if tokens > max_context {
        return Err(Refusal::ContextTooSmall { prompt_tokens, max_tokens, max_context });
    }
    if let Some(content) = launch.content.as_ref().filter(|content| content.tokens.len() != end) {
        return Err(Refusal::WrongContent { tokens: content.tokens.len(), prefill: end });
    }
    let held = match launch.role {
        GraphRole::Prefill => launch.prefill_tokens(),
        GraphRole::Encode => 0,
        GraphRole::Whole | GraphRole::Decode => tokens,
    };
    let shared = launch.content.as_ref().filter(|_| !config.settings.no_prefix_cache);
    let last = prefill.last().map_or(WalkId(0), |segment| segment.walk);
    let recompute = walks.recompute(last);
    Ok(Request {
        key: launch.key,
        share: launch.share,
        role: launch.role,
        awaits_media: launch.awaits_media,
        is_masked: launch.is_masked,
        runs_ahead: false,
        awaits_mask: launch.awaits_mask,
        is_pinned: launch.role == GraphRole::Decode
            && launch.content.as_ref().is_some_and(|content| !content.media.is_empty()),
        has_yielded: false,
        prefill,
        recompute: (recompute, walks.cut(recompute)?),
        prompt_tokens,
        decode: launch.decode.filter(|_| launch.role != GraphRole::Prefill),
        generated: launch.generated,
        stopping: launch.stopping,
        life: Needs::of_whole_life(held, pool)?,
        epoch: Epoch(0),
        is_scored: launch.content.as_ref().is_some_and(|content| !content.may_reuse),
        first_block: shared
            .filter(|_| end >= config.page_tokens)
            .map(|content| hash_of_first(&content.block(0, config.page_tokens))),
        following: Following::Nobody,
        content: launch.content.filter(|_| !config.settings.no_prefix_cache),
        cached_tokens: None,
        known_tokens: 0,
        deadline: launch.deadline,
    })
}
