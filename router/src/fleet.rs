//! The conductors behind a router: who they are, how they are, and which of them a request goes to.

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
mod settings;
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
use tutti_runtime::{
    metrics::Metrics,
    prefix_index::{Holder, PrefixIndex, PromptPieces, block_tokens},
};

pub use self::{
    address::{Conductors, check as check_conductors},
    failure::Failure,
    lease::Lease,
    member::Member,
    prompt_blocks::PromptBlocks,
    settings::FleetSettings,
};
use self::{
    choice::Candidate, identity::Identity, lease::Hold, load::Booking, member::Timeouts,
    metrics::FleetMetrics, roster::Roster, texts::Texts,
};
use crate::{
    conductor_channel::ConductorChannel,
    served::{CheckedText, ServedModel},
};

/// All conductors of one router.
pub struct Fleet {
    settings: FleetSettings,
    texts: Texts,
    discover: Option<String>,
    roster: RwLock<Roster>,
    /// Why the name given by `discover` leads nowhere at the moment.
    lookup_trouble: Mutex<Option<String>>,
    index: Mutex<PrefixIndex>,
    agreed: RwLock<Option<Agreed>>,
    /// Held by whoever decides what is served, so that two never do at once.
    deciding: tokio::sync::Mutex<()>,
    picks: AtomicU64,
    holders: AtomicU64,
    /// Raised whenever anything about a member may have changed.
    changed: watch::Sender<u64>,
    metrics: FleetMetrics,
}

/// What the fleet serves.
#[derive(Clone)]
struct Agreed {
    identity: Identity,
    served: Arc<ServedModel>,
}

/// A conductor that failed a choice: it is passed over until it says, in answer to a later question, that it is ready.
pub struct Avoided {
    member: Arc<Member>,
    since: Instant,
}

impl Avoided {
    /// Who.
    pub fn member(&self) -> &Arc<Member> {
        &self.member
    }

    /// It failed now.
    pub fn now(member: Arc<Member>) -> Self {
        Self { member, since: Instant::now() }
    }
}

/// How much is known of a conductor before it is sent a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// One that is ready, or was when it was asked last.
    Ready,
    /// Any that serves the model: its own answer is better than none.
    Any,
}

impl Fleet {
    /// A fleet of these conductors; nothing is known of any yet, unless the text of the only one: `text`.
    pub fn new(
        conductors: Conductors,
        settings: FleetSettings,
        skip_tokenizer_init: bool,
        text: Option<CheckedText>,
        metrics: &Metrics,
    ) -> Arc<Self> {
        let index = PrefixIndex::new(settings.prefix_index_bytes, settings.prefix_index_age());
        let fleet = Self {
            settings,
            texts: Texts::new(skip_tokenizer_init, text),
            discover: conductors.discover,
            roster: RwLock::default(),
            lookup_trouble: Mutex::default(),
            index: Mutex::new(index),
            agreed: RwLock::new(None),
            deciding: tokio::sync::Mutex::new(()),
            picks: AtomicU64::new(0),
            holders: AtomicU64::new(0),
            changed: watch::Sender::new(0),
            metrics: FleetMetrics::register(metrics),
        };
        let fixed = conductors.fixed.into_iter();
        let members = fixed.map(|(name, channel)| Arc::new(fleet.member(name, channel))).collect();
        *fleet.roster.write() = Roster::fixed(members);
        Arc::new(fleet)
    }

    /// How it was set up.
    pub fn settings(&self) -> &FleetSettings {
        &self.settings
    }

    /// What is served, once it is known.
    pub fn served(&self) -> Option<Arc<ServedModel>> {
        self.agreed.read().as_ref().map(|agreed| agreed.served.clone())
    }

    /// Asks every conductor how it is, now and not in a while: somebody has heard that one has changed.
    pub fn ask_again(&self) {
        self.roster.read().members().iter().for_each(|member| member.doubt());
    }

    /// To wait for a conductor to come back.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// A prompt as its choices are placed by it.
    pub fn cut(&self, model: &ServedModel, prompt: Arc<[u32]>) -> PromptBlocks {
        let block_tokens = block_tokens(&model.description);
        // Nothing is chosen between, and hashing a long prompt takes a while.
        let pieces = match self.roster.read().members().len() {
            0 | 1 => PromptPieces::uncut(prompt.len(), block_tokens),
            _ => PromptPieces::new(&prompt, block_tokens),
        };
        PromptBlocks { tokens: prompt, pieces }
    }

    /// Where a choice of this prompt, which has `generated` tokens already, goes best. None if there is nowhere, or if
    /// what is served is no longer `model`.
    pub fn pick(
        &self,
        model: &ServedModel,
        prompt: &PromptBlocks,
        generated: usize,
        avoided: &[Avoided],
        need: Need,
    ) -> Option<Lease> {
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
            self.metrics.index(index.entries(), index.bytes());
        }
        self.metrics.picked(&member, indexable, cached);
        let booking = Booking::new(member.own.clone(), needed - cached);
        let hold = Hold { member, holder, ticket };
        Some(Lease::new(hold, booking, block_tokens, self.metrics.clone()))
    }

    /// Counts a choice that leaves a conductor, before its first token or `behind` it.
    pub fn count_leaving(&self, member: &Member, behind: bool) {
        self.metrics.left(member, behind);
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
