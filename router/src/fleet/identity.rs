//! The identity of a conductor's model. A request may continue on any conductor with an equal identity.

use tutti_proto::cluster::v1::ModelDescription;

/// A model and its text files.
#[derive(Clone, Debug, PartialEq)]
pub struct Identity {
    /// The description without `max_request_tokens`, which depends on the workers and not on the model.
    description: ModelDescription,
    /// Digest of the text files.
    text_files: u64,
}

impl Identity {
    /// Creates the identity from a conductor's description and the digest of its text files.
    pub fn new(description: &ModelDescription, text_files: u64) -> Self {
        Self { description: without_request_limit(description), text_files }
    }

    /// True if the description is equal to this identity's description, apart from `max_request_tokens`.
    pub fn describes(&self, description: &ModelDescription) -> bool {
        self.description == without_request_limit(description)
    }

    /// Text that says how this identity differs from `others`, the identity of the other conductors' model; `None` if
    /// both are equal.
    pub fn difference(&self, others: &Self) -> Option<String> {
        let (ours, theirs) = (&self.description, &others.description);
        let names = |description: &ModelDescription| {
            [std::slice::from_ref(&description.served_name), &description.aliases].concat().join(", ")
        };
        if names(ours) != names(theirs) {
            return Some(format!("serves {:?}, the others {:?}", names(ours), names(theirs)));
        }
        if ours != theirs {
            return Some(format!(
                "serves another model than the others under the name {:?}",
                ours.served_name
            ));
        }
        if self.text_files != others.text_files {
            return Some("has another tokenizer, chat template or generation config than the others".into());
        }
        None
    }
}

fn without_request_limit(description: &ModelDescription) -> ModelDescription {
    ModelDescription { max_request_tokens: 0, ..description.clone() }
}

#[cfg(test)]
mod tests;
