//! The conductors behind a router: membership, state, and the pick of a conductor for each request.

mod address;
mod breaker;
mod choice;
mod failure;
mod follow;
mod identity;
mod lease;
mod load;
mod member;
mod metrics;
mod prompt_blocks;
mod roster;
mod texts;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;
use tutti_proto::CacheSalt;
use tutti_runtime::{
    command_line::processes::ROUTER,
    metrics::Metrics,
    prefix_index::{Holder, PrefixIndex, PromptPieces, block_tokens},
};
pub use tutti_settings::FleetSettings;

pub use self::{
    address::{Access, Conductors, check as check_conductors, check_reach},
    failure::Failure,
    lease::Lease,
    load::Queue,
    member::Member,
    prompt_blocks::PromptBlocks,
};
use self::{
    choice::Candidate, identity::Identity, lease::Hold, load::Booking, member::Timeouts,
    metrics::FleetMetrics, roster::Roster, texts::Texts,
};
use crate::{
    conductor_channel::ConductorChannel,
    served::{CheckedText, ServedModel, TextSettings},
};

/// All conductors of one router.
pub struct Fleet {
    settings: FleetSettings,
    texts: Texts,
    discover: Option<String>,
    /// Credentials and encryption of the connections to discovered conductors.
    access: Access,
    roster: RwLock<Roster>,
    /// Error of the last DNS lookup of `discover`; `None` if the lookup succeeded.
    lookup_trouble: Mutex<Option<String>>,
    index: Mutex<PrefixIndex>,
    agreed: RwLock<Option<Agreed>>,
    /// Held while a task decides which model is served, so that one task decides at a time.
    deciding: tokio::sync::Mutex<()>,
    /// Number of picks so far.
    picks: AtomicU64,
    /// Number of [`Holder`] ids given out so far. A holder is a conductor's process in the prefix index.
    holders: AtomicU64,
    /// Incremented whenever a member may have changed.
    changed: watch::Sender<u64>,
    metrics: FleetMetrics,
    /// The metrics of the process, which name the served model.
    of_process: Metrics,
}

/// The model that the fleet serves.
#[derive(Clone)]
struct Agreed {
    identity: Identity,
    served: Arc<ServedModel>,
}

/// A conductor on which an attempt at a choice failed. The choice avoids the conductor until the conductor answers a
/// later poll with "ready".
pub struct Avoided {
    member: Arc<Member>,
    since: Instant,
}

impl Avoided {
    /// The conductor.
    pub fn member(&self) -> &Arc<Member> {
        &self.member
    }

    /// Avoids a conductor that failed now.
    pub fn now(member: Arc<Member>) -> Self {
        Self { member, since: Instant::now() }
    }
}

/// The state that [`Fleet::pick`] requires of a conductor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// The conductor was ready at its last poll.
    Ready,
    /// The conductor serves the model, ready or not. If no conductor is ready, a conductor's refusal is better than no
    /// answer.
    Any,
}

/// Input of [`Fleet::pick`]. A *choice* is one of the answers that a request asks for. Each choice is sent to a
/// conductor independently of the request's other choices.
#[derive(Clone, Copy)]
pub struct PickRequest<'a> {
    /// The model that the choice was prepared for.
    pub model: &'a ServedModel,
    /// The choice's prompt.
    pub prompt: &'a PromptBlocks,
    /// Number of output tokens that earlier attempts at the choice have generated.
    pub generated: usize,
    /// Conductors to avoid, because an attempt at this choice failed on them.
    pub avoided: &'a [Avoided],
    /// Requirement on the conductor's state.
    pub need: Need,
}

/// The way in which a choice continues on another conductor after a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// The choice had no output token yet: the same request is sent again.
    Retry,
    /// The choice had output tokens: the next conductor continues after those tokens.
    Replay,
}

impl Fleet {
    /// Creates a fleet. The state of every conductor is unknown at first. `text` is the parsed text of an embedded
    /// router's only conductor, if known.
    pub fn new(
        conductors: Conductors,
        settings: FleetSettings,
        text_settings: TextSettings,
        text: Option<CheckedText>,
        metrics: &Metrics,
    ) -> Arc<Self> {
        let index = PrefixIndex::new(settings.prefix_index_bytes, settings.prefix_index_age());
        let fleet = Self {
            settings,
            texts: Texts::new(text_settings, text),
            discover: conductors.discover,
            access: conductors.access,
            roster: RwLock::default(),
            lookup_trouble: Mutex::default(),
            index: Mutex::new(index),
            agreed: RwLock::new(None),
            deciding: tokio::sync::Mutex::new(()),
            picks: AtomicU64::new(0),
            holders: AtomicU64::new(0),
            changed: watch::Sender::new(0),
            metrics: metrics.register_of(ROUTER.name, FleetMetrics::register),
            of_process: metrics.clone(),
        };
        let fixed = conductors.fixed.into_iter();
        let members = fixed.map(|(name, channel)| Arc::new(fleet.member(name, channel))).collect();
        *fleet.roster.write() = Roster::fixed(members);
        Arc::new(fleet)
    }

    /// The settings.
    pub fn settings(&self) -> &FleetSettings {
        &self.settings
    }

    /// The served model; `None` until it is known.
    pub fn served(&self) -> Option<Arc<ServedModel>> {
        self.agreed.read().as_ref().map(|agreed| agreed.served.clone())
    }

    /// The conductors, in the order in which they joined.
    pub fn members(&self) -> Vec<Arc<Member>> {
        self.roster.read().members().to_vec()
    }

    /// The requests that wait on all conductors, as of their last reports.
    pub fn queue(&self) -> Queue {
        let roster = self.roster.read();
        let reported = roster.members().iter().map(|member| member.standing.lock().reported.queue());
        reported.fold(Queue::default(), Queue::and)
    }

    /// Polls every conductor now, without waiting for the end of its poll interval. Called when a conductor may have
    /// changed.
    pub fn ask_again(&self) {
        self.roster.read().members().iter().for_each(|member| member.doubt());
    }

    /// A receiver that is notified when a conductor may have changed.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Cuts a prompt into blocks. Conductors are compared by the number of these blocks that they have cached.
    pub fn cut(&self, model: &ServedModel, prompt: Arc<[u32]>, salt: CacheSalt) -> PromptBlocks {
        let block_tokens = block_tokens(&model.description);
        // With a single conductor there is nothing to compare, and hashing a long prompt takes time. So the prompt
        // stays uncut.
        let pieces = match self.roster.read().members().len() {
            0 | 1 => PromptPieces::uncut(prompt.len(), block_tokens),
            _ => PromptPieces::new(&prompt, salt, block_tokens),
        };
        PromptBlocks { tokens: prompt, pieces }
    }

    /// Picks the best conductor for a choice. Returns `None` if no conductor qualifies, or if the fleet no longer
    /// serves the model that the choice was prepared for.
    pub fn pick(&self, request: PickRequest<'_>) -> Option<Lease> {
        let PickRequest { model, prompt, generated, avoided, need } = request;
        let now = Instant::now();
        let same = |agreed: &Agreed| Arc::ptr_eq(&agreed.served.text, &model.text);
        if !self.agreed.read().as_ref().is_some_and(same) {
            return None;
        }
        let PromptBlocks { tokens, pieces } = prompt;
        let block_tokens = pieces.block_tokens();
        let needed = pieces.needed() + generated.div_ceil(block_tokens);
        let roster = self.roster.read();
        let mut index = self.index.lock();
        let held = index.held(pieces, tokens, now);
        let offer = |member: &Arc<Member>| {
            let failed = avoided.iter().find(|avoided| Arc::ptr_eq(&avoided.member, member)).map(|a| a.since);
            let standing = member.standing.lock();
            let tier = standing.tier(failed, need, now)?;
            let load = standing.reported.load(&member.own, needed);
            let held = held.iter().find(|(holder, _)| *holder == standing.holder);
            let cached_blocks = held.map_or(0, |(_, blocks)| *blocks);
            Some((member.clone(), Candidate { tier, load, cached_blocks, last_pick: standing.last_pick }))
        };
        let (mut members, candidates): (Vec<_>, Vec<_>) = roster.members().iter().filter_map(offer).unzip();
        let chosen = choice::choose(&candidates, needed)?;
        let (member, cached) = (members.swap_remove(chosen), candidates[chosen].cached_blocks);
        let (holder, ticket) = {
            let mut standing = member.standing.lock();
            standing.last_pick = self.picks.fetch_add(1, Relaxed) + 1;
            (standing.holder, standing.breaker.pass(now))
        };
        let indexable = pieces.indexable();
        if indexable > 0 {
            index.insert(pieces, tokens, holder, now);
            self.metrics.index(index.size());
        }
        self.metrics.picked(&member, indexable, cached);
        let booking = Booking::new(member.own.clone(), needed - cached);
        let hold = Hold { member, holder, ticket };
        Some(Lease::new(hold, booking, block_tokens, self.metrics.clone()))
    }

    /// Counts a choice that moves from `member` to another conductor.
    pub fn count_leaving(&self, member: &Member, recovery: Recovery) {
        self.metrics.left(member, recovery);
    }

    fn member(&self, name: String, channel: ConductorChannel) -> Member {
        let timeouts =
            Timeouts { answer: self.settings.answer_timeout(), accept: self.settings.accept_timeout() };
        Member::new(name, channel, timeouts, self.new_holder())
    }

    fn new_holder(&self) -> Holder {
        Holder(self.holders.fetch_add(1, Relaxed))
    }
}
