//! Follows the conductors: polls each at a fixed interval, looks up the DNS name, and sets the router's readiness.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    net::lookup_host,
    task::JoinSet,
    time::{sleep, timeout},
};
use tutti_proto::cluster::v1::ModelDescription;
use tutti_runtime::{
    Error, ErrorKind,
    health::{Health, State},
};

use super::{
    Agreed, Fleet, address,
    breaker::Breaker,
    identity::Identity,
    load::Reported,
    member::{Contact, Member, Standing},
    texts::Offer,
};
use crate::served::ServedModel;

/// Poll interval of a conductor that is not ready.
const POLL_STARTING: Duration = Duration::from_millis(100);
/// Interval at which the conductors' states are looked at though none has changed.
const BEAT: Duration = Duration::from_secs(1);
/// Time without such a look after which the process counts as dead.
const PATIENCE: Duration = Duration::from_secs(30);

/// A conductor's answer to a poll.
struct Answer {
    description: ModelDescription,
    identity: Identity,
    misfit: Option<String>,
    ready: State,
    reported: Reported,
}

impl Fleet {
    /// Follows the conductors for as long as the future is polled. No other task writes the readiness in `health`.
    /// "Ready" means that a request sent now would be served.
    pub async fn follow(self: Arc<Self>, health: Health) {
        let pulse = health.pulse("the task that follows the conductors", PATIENCE);
        let mut tasks = JoinSet::new();
        if let Some(name) = self.discover.clone() {
            tasks.spawn(self.clone().look_up(name));
        }
        let mut watched: Vec<Arc<Member>> = Vec::new();
        let mut changes = self.changes();
        let (mut polled, mut was_ready) = (false, false);
        loop {
            changes.mark_unchanged();
            watched.retain(|member| !member.is_removed());
            let members = self.roster.read().members().to_vec();
            for member in members {
                if !watched.iter().any(|known| Arc::ptr_eq(known, &member)) {
                    tasks.spawn(self.clone().watch(member.clone()));
                    watched.push(member);
                }
            }
            let (state, remarks) = self.readiness();
            // A draining router stays unready whatever its conductors do, and has said so once.
            if health.ready() != state && !health.is_draining() {
                match &state {
                    State::Ok if was_ready => tracing::info!("ready for requests again"),
                    // Not logged: the process announces its first readiness elsewhere, with its addresses.
                    State::Ok => {}
                    State::Not(reason) if was_ready => tracing::info!(%reason, "not ready for requests"),
                    State::Not(reason) if polled => tracing::info!(%reason, "not ready for requests yet"),
                    // Not logged: in the first iteration, no conductor has had time to answer.
                    State::Not(_) => {}
                }
            }
            polled = true;
            was_ready |= state == State::Ok;
            health.set_remarks(remarks);
            health.set_ready(state);
            // Forgets the tasks that have ended because their member was removed.
            while tasks.try_join_next().is_some() {}
            pulse.beat();
            if let Ok(Err(_)) = timeout(BEAT, changes.changed()).await {
                return;
            }
        }
    }

    /// The router's readiness, and a remark for each conductor that gets no requests.
    fn readiness(&self) -> (State, Vec<String>) {
        let roster = self.roster.read();
        let (mut ready, mut out) = (false, Vec::new());
        for member in roster.members() {
            let standing = member.standing.lock();
            ready |= standing.is_ready();
            if let Some(why) = standing.why_out() {
                // A single conductor needs no name.
                let alone = roster.members().len() == 1 && self.discover.is_none();
                out.push(if alone { why } else { format!("{}: {why}", member.name) });
            }
        }
        out.extend(self.lookup_trouble.lock().clone());
        if ready {
            return (State::Ok, out);
        }
        if out.is_empty() {
            out.push("no conductor is known yet".into());
        }
        (State::Not(out.join("; ")), Vec::new())
    }

    /// Polls one conductor until it is removed from the fleet.
    async fn watch(self: Arc<Self>, member: Arc<Member>) {
        while !member.is_removed() {
            let asked = Instant::now();
            let pause = match self.ask(&member).await {
                Ok(answer) => self.note_answer(&member, asked, answer),
                Err(error) => {
                    // The conductor may still be loading its model, so the router uses the time to parse the text
                    // files.
                    if error.kind() == ErrorKind::Unavailable && self.agreed.read().is_none() {
                        self.texts.read_ahead(&member).await;
                    }
                    self.note_error(&member, &error)
                }
            };
            self.share_request_limit();
            self.changed.send_modify(|count| *count += 1);
            member.doubted(pause).await;
        }
    }

    async fn ask(&self, member: &Arc<Member>) -> Result<Answer, Error> {
        let (description, ready) = member.describe().await?;
        let reported = match ready {
            State::Ok => Reported::of(&member.cluster().await?, &member.own),
            State::Not(_) => Reported::default(),
        };
        let known = {
            let standing = member.standing.lock();
            // A conductor that was lost may have restarted with another model, so the earlier identity is not reused.
            let same_life = !matches!(standing.contact, Contact::Unknown | Contact::Lost(_));
            standing.identity.clone().filter(|identity| same_life && identity.describes(&description))
        };
        let (identity, misfit) = self.compare(member, &description, known).await?;
        Ok(Answer { description, identity, misfit, ready, reported })
    }

    /// Returns the identity of the conductor's model, and its difference from the fleet's model, as text. If the models
    /// differ and no other conductor serves the fleet's model, the fleet switches to this conductor's model, and no
    /// difference is left.
    async fn compare(
        &self,
        member: &Arc<Member>,
        description: &ModelDescription,
        known: Option<Identity>,
    ) -> Result<(Identity, Option<String>), Error> {
        let agreed = self.agreed.read().clone();
        if let (Some(known), Some(agreed)) = (&known, &agreed) {
            let difference = known.difference(&agreed.identity);
            if difference.is_none() || self.others_serve(member, &agreed.identity) {
                return Ok((known.clone(), difference));
            }
        }
        let offer = self.texts.offer(member).await?;
        let identity = Identity::new(description, offer.digest());
        let _deciding = self.deciding.lock().await;
        let agreed = self.agreed.read().clone();
        if let Some(agreed) = agreed {
            let difference = identity.difference(&agreed.identity);
            if difference.is_none() || self.others_serve(member, &agreed.identity) {
                return Ok((identity, difference));
            }
        }
        self.agree(identity.clone(), description.clone(), offer).await?;
        // Written while `deciding` is held: the next task that decides must see that this conductor serves the fleet's
        // model.
        member.standing.lock().identity = Some(identity.clone());
        Ok((identity, None))
    }

    /// True if another conductor serves this model. A lost conductor counts with the model that it last served.
    fn others_serve(&self, member: &Arc<Member>, identity: &Identity) -> bool {
        let roster = self.roster.read();
        let mut others = roster.members().iter().filter(|other| !Arc::ptr_eq(other, member));
        others.any(|other| other.standing.lock().identity.as_ref() == Some(identity))
    }

    /// Makes the offered model the fleet's model. Running requests keep the model that they began with.
    async fn agree(
        &self,
        identity: Identity,
        description: ModelDescription,
        offer: Offer,
    ) -> Result<(), Error> {
        let text = self.texts.read(offer).await?;
        let (tokenizer, template) = (text.tokenizer.is_some(), text.template.is_some());
        let name = &description.served_name;
        tracing::info!(%name, tokenizer, chat_template = template, "the front door has read the model's text files");
        let served = Arc::new(ServedModel { description, text });
        *self.agreed.write() = Some(Agreed { identity, served });
        Ok(())
    }

    /// Sets the limit of tokens per request to the smallest limit of the conductors in use, so that a request fits any
    /// of them.
    fn share_request_limit(&self) {
        let mut agreed = self.agreed.write();
        let Some(Agreed { identity, served }) = agreed.as_mut() else { return };
        let roster = self.roster.read();
        let limit = |member: &Arc<Member>| {
            let standing = member.standing.lock();
            let answers = matches!(standing.contact, Contact::Ready(_) | Contact::NotReady(_));
            (answers && standing.identity.as_ref() == Some(identity)).then_some(standing.max_request_tokens)
        };
        let Some(smallest) = roster.members().iter().filter_map(limit).min() else { return };
        if served.description.max_request_tokens != smallest {
            let description = ModelDescription { max_request_tokens: smallest, ..served.description.clone() };
            *served = Arc::new(ServedModel { description, text: served.text.clone() });
        }
    }

    /// Records a conductor's answer to a poll. Returns the time until the next poll.
    fn note_answer(&self, member: &Member, asked: Instant, answer: Answer) -> Duration {
        let contact = match answer.ready {
            State::Ok => Contact::Ready(asked),
            State::Not(why) => Contact::NotReady(why),
        };
        let ready = matches!(contact, Contact::Ready(_));
        self.note(member, |standing| {
            if matches!(standing.contact, Contact::Unknown | Contact::Lost(_)) {
                standing.holder = self.new_holder();
                standing.breaker = Breaker::default();
            }
            standing.contact = contact;
            standing.max_request_tokens = answer.description.max_request_tokens;
            standing.identity = Some(answer.identity);
            standing.misfit = answer.misfit;
            standing.reported = answer.reported;
        });
        if ready { self.settings.poll() } else { POLL_STARTING }
    }

    /// Records a failed poll. Returns the time until the next poll.
    fn note_error(&self, member: &Member, error: &Error) -> Duration {
        self.note(member, |standing| {
            standing.contact = Contact::Lost(error.to_string());
            standing.reported = Reported::default();
        });
        match error.kind() {
            ErrorKind::Unavailable => POLL_STARTING,
            // An example is a file of the conductor that cannot be parsed. Another attempt would be expensive and would
            // probably fail too, so the next poll waits for a whole poll interval.
            _ => self.settings.poll(),
        }
    }

    fn note(&self, member: &Member, change: impl FnOnce(&mut Standing)) {
        // A change of the only conductor is not logged here: `follow` logs it as a change of the router's readiness.
        // The roster is locked before the member, in the same order as in a pick.
        let alone = self.roster.read().members().len() == 1;
        let mut standing = member.standing.lock();
        let before = standing.why_out();
        change(&mut standing);
        let after = standing.why_out();
        if before != after && !alone {
            match &after {
                None => tracing::info!(conductor = %member.name, "the conductor gets requests"),
                Some(why) => tracing::warn!(conductor = %member.name, %why, "the conductor gets no requests"),
            }
        }
        if !member.is_removed() {
            self.metrics.standing(member, &standing);
        }
    }

    /// Looks up the DNS name periodically. A failed lookup changes nothing.
    async fn look_up(self: Arc<Self>, name: String) {
        loop {
            let found = lookup_host(&name).await.map(|found| found.map(address::url).collect());
            let trouble = match found {
                Ok(found) => self.take_found(&name, found),
                Err(error) => Some(format!("discover: {name}: {error}")),
            };
            self.note_lookup(trouble);
            self.changed.send_modify(|count| *count += 1);
            sleep(self.settings.discover()).await;
        }
    }

    fn note_lookup(&self, trouble: Option<String>) {
        let mut known = self.lookup_trouble.lock();
        if *known != trouble {
            if let Some(trouble) = &trouble {
                tracing::warn!(%trouble, "the lookup of conductors failed; the known ones stay");
            }
            *known = trouble;
        }
    }

    /// Updates the roster with the addresses found. Returns an error text if `found` is empty, or has an address that
    /// may not be used.
    fn take_found(&self, name: &str, found: BTreeSet<String>) -> Option<String> {
        if found.is_empty() {
            return Some(format!("discover: {name} has no address"));
        }
        let mut refused = None;
        let join = |url: &str| match address::connection(url, &self.access, &self.settings) {
            Ok(channel) => Some(self.member(url.to_owned(), channel)),
            Err(error) => {
                refused = Some(format!("discover: {error}"));
                None
            }
        };
        let change = self.roster.write().update(&found, join);
        for member in &change.joined {
            tracing::info!(conductor = %member.name, "found a conductor");
        }
        for member in &change.left {
            tracing::info!(conductor = %member.name, "the lookup no longer finds the conductor; its running requests continue");
            self.metrics.removed(member);
        }
        refused
    }
}

#[cfg(test)]
mod tests;
