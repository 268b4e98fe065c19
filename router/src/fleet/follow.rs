//! Keeps up with the conductors: asks each at a fixed pace, looks the name up, and says whether the router is ready.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{net::lookup_host, task::JoinSet, time::sleep};
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

/// How often a conductor is asked that is not ready.
const POLL_STARTING: Duration = Duration::from_millis(100);

/// What a conductor answered.
struct Answer {
    description: ModelDescription,
    identity: Identity,
    misfit: Option<String>,
    ready: State,
    reported: Reported,
}

impl Fleet {
    /// Follows the conductors for as long as it is polled, and writes into `health` whether a request sent now would be
    /// served. It is the readiness's only writer where a router runs.
    pub async fn follow(self: Arc<Self>, health: Health) {
        let mut tasks = JoinSet::new();
        if let Some(name) = self.discover.clone() {
            tasks.spawn(self.clone().look_up(name));
        }
        let mut watched: Vec<Arc<Member>> = Vec::new();
        let mut changes = self.changes();
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
            if health.ready() != state {
                match &state {
                    State::Ok => tracing::info!("the front door is ready"),
                    State::Not(reason) => tracing::info!(%reason, "the front door is not ready"),
                }
            }
            health.set_remarks(remarks);
            health.set_ready(state);
            // Ended tasks are those of members that were taken out.
            while tasks.try_join_next().is_some() {}
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// Whether any conductor takes requests, and which do not and why.
    fn readiness(&self) -> (State, Vec<String>) {
        let roster = self.roster.read();
        let (mut ready, mut out) = (false, Vec::new());
        for member in roster.members() {
            let standing = member.standing.lock();
            ready |= standing.is_ready();
            if let Some(why) = standing.why_out() {
                // One alone needs no name.
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

    /// Asks one conductor again and again, until it is taken out.
    async fn watch(self: Arc<Self>, member: Arc<Member>) {
        while !member.is_removed() {
            let asked = Instant::now();
            let pause = match self.ask(&member).await {
                Ok(answer) => self.note_answer(&member, asked, answer),
                Err(error) => {
                    // It may be loading: what takes the router a moment is then done meanwhile.
                    if error.kind() == ErrorKind::Unavailable && self.agreed.read().is_none() {
                        self.texts.read_ahead(&member).await;
                    }
                    self.note_error(&member, &error)
                }
            };
            self.share_room();
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
            // One that was lost may have come back as something else.
            let same_life = !matches!(standing.contact, Contact::Unknown | Contact::Lost(_));
            standing.identity.clone().filter(|identity| same_life && identity.describes(&description))
        };
        let (identity, misfit) = self.compare(member, &description, known).await?;
        Ok(Answer { description, identity, misfit, ready, reported })
    }

    /// What the conductor serves, and in what that differs from what the fleet serves. Where none other serves that, it
    /// is what the fleet serves from now on.
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
        // Before anyone else decides: it is this conductor that serves what was agreed on.
        member.standing.lock().identity = Some(identity.clone());
        Ok((identity, None))
    }

    /// Whether any other conductor, lost ones too, serves this.
    fn others_serve(&self, member: &Arc<Member>, identity: &Identity) -> bool {
        let roster = self.roster.read();
        let mut others = roster.members().iter().filter(|other| !Arc::ptr_eq(other, member));
        others.any(|other| other.standing.lock().identity.as_ref() == Some(identity))
    }

    /// Serves this from now on; requests under way keep what they began with.
    async fn agree(
        &self,
        identity: Identity,
        description: ModelDescription,
        offer: Offer,
    ) -> Result<(), Error> {
        let text = self.texts.read(offer).await?;
        let (tokenizer, template) = (text.tokenizer.is_some(), text.template.is_some());
        let name = &description.served_name;
        tracing::info!(%name, tokenizer, chat_template = template, "the front door knows its model");
        let served = Arc::new(ServedModel { description, text });
        *self.agreed.write() = Some(Agreed { identity, served });
        Ok(())
    }

    /// Holds requests to the smallest room that any conductor in use has, so that each fits all of them.
    fn share_room(&self) {
        let mut agreed = self.agreed.write();
        let Some(Agreed { identity, served }) = agreed.as_mut() else { return };
        let roster = self.roster.read();
        let room = |member: &Arc<Member>| {
            let standing = member.standing.lock();
            let answers = matches!(standing.contact, Contact::Ready(_) | Contact::NotReady(_));
            (answers && standing.identity.as_ref() == Some(identity)).then_some(standing.max_request_tokens)
        };
        let Some(smallest) = roster.members().iter().filter_map(room).min() else { return };
        if served.description.max_request_tokens != smallest {
            let description = ModelDescription { max_request_tokens: smallest, ..served.description.clone() };
            *served = Arc::new(ServedModel { description, text: served.text.clone() });
        }
    }

    /// Returns how long to wait before asking again.
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

    /// As [`Fleet::note_answer`].
    fn note_error(&self, member: &Member, error: &Error) -> Duration {
        self.note(member, |standing| {
            standing.contact = Contact::Lost(error.to_string());
            standing.reported = Reported::default();
        });
        match error.kind() {
            ErrorKind::Unavailable => POLL_STARTING,
            // A file that cannot be read, say: looking again soon would cost much and help little.
            _ => self.settings.poll(),
        }
    }

    fn note(&self, member: &Member, change: impl FnOnce(&mut Standing)) {
        // A router's only conductor is told of as the router itself. Asked before the lock: a pick takes both the other
        // way round.
        let alone = self.roster.read().members().len() == 1;
        let mut standing = member.standing.lock();
        let before = standing.why_out();
        change(&mut standing);
        let after = standing.why_out();
        if before != after && !alone {
            match &after {
                None => tracing::info!(conductor = %member.name, "in use"),
                Some(why) => tracing::warn!(conductor = %member.name, %why, "out of use"),
            }
        }
        if !member.is_removed() {
            self.metrics.standing(member, &standing);
        }
    }

    /// Looks the name up again and again. A name that leads nowhere for a moment changes nothing.
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
                tracing::warn!(%trouble, "keeping the conductors that are known");
            }
            *known = trouble;
        }
    }

    /// Takes in who was found; says what is wrong with that, if anything.
    fn take_found(&self, name: &str, found: BTreeSet<String>) -> Option<String> {
        if found.is_empty() {
            return Some(format!("discover: {name} has no address"));
        }
        let join =
            |url: &str| Some(self.member(url.to_owned(), address::connection(url, &self.settings).ok()?));
        let change = self.roster.write().found(&found, join);
        for member in &change.joined {
            tracing::info!(conductor = %member.name, "found");
        }
        for member in &change.left {
            tracing::info!(conductor = %member.name, "no longer found; what runs there goes on");
            self.metrics.removed(member);
        }
        None
    }
}

#[cfg(test)]
mod tests;
