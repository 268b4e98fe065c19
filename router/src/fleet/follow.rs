//! Follows the conductors: polls each of them periodically, and sets the router's readiness.

mod agreement;
mod lookup;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{task::JoinSet, time::timeout};
use tutti_proto::cluster::v1::ModelDescription;
use tutti_runtime::{
    Error, ErrorKind,
    health::{Health, State},
};

use super::{
    Fleet,
    breaker::Breaker,
    identity::Identity,
    load::Reported,
    member::{Contact, Member, Standing},
};

/// Poll interval of a conductor that is not ready.
const POLL_STARTING: Duration = Duration::from_millis(100);
/// Maximum time between two checks of the conductors' states. A change of a state triggers a check at once.
const BEAT: Duration = Duration::from_secs(1);
/// Time without a check of the conductors' states after which the process counts as dead.
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
            // A draining router stays unready, and has already logged that.
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
            // For example, a file of the conductor cannot be parsed. Another attempt is expensive and probably fails
            // too, so the next poll waits for the whole poll interval.
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
}
