//! The agreement on one model: the fleet serves one model, and conductors that serve another model get no requests.

use std::sync::Arc;

use tutti_proto::cluster::v1::ModelDescription;
use tutti_runtime::Error;

use super::super::{
    Agreed, Fleet,
    identity::Identity,
    member::{Contact, Member},
    texts::Offer,
};
use crate::served::ServedModel;

impl Fleet {
    /// Returns the identity of the conductor's model, and its difference from the fleet's model, as text. If the models
    /// differ and no other conductor serves the fleet's model, the fleet switches to this conductor's model, and the
    /// difference is `None`.
    pub(super) async fn compare(
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
        self.of_process.serve_model(name);
        tracing::info!(%name, tokenizer, chat_template = template, "the front door has read the model's text files");
        let served = Arc::new(ServedModel { description, text });
        *self.agreed.write() = Some(Agreed { identity, served });
        Ok(())
    }

    /// Sets the limit of tokens per request to the smallest limit of the conductors in use, so that a request fits any
    /// of them.
    pub(super) fn share_request_limit(&self) {
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
}
