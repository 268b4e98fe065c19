//! What a conductor serves, so that conductors can be compared: a request may go on at any that serve the same.

use tutti_proto::cluster::v1::ModelDescription;

/// A model and its text files.
#[derive(Clone, Debug, PartialEq)]
pub struct Identity {
    /// Without the room of its workers, which does not make it another model.
    description: ModelDescription,
    text_files: u64,
}

impl Identity {
    /// Of what a conductor described, and the digest of the files that it has for it.
    pub fn new(description: &ModelDescription, text_files: u64) -> Self {
        Self { description: without_room(description), text_files }
    }

    /// Whether it is of this description.
    pub fn describes(&self, description: &ModelDescription) -> bool {
        self.description == without_room(description)
    }

    /// In what it differs from what the others serve; none if in nothing.
    pub fn difference(&self, others: &Self) -> Option<String> {
        let (ours, theirs) = (&self.description, &others.description);
        if ours.served_name != theirs.served_name {
            return Some(format!("serves {:?}, the others {:?}", ours.served_name, theirs.served_name));
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

fn without_room(description: &ModelDescription) -> ModelDescription {
    ModelDescription { max_request_tokens: 0, ..description.clone() }
}

#[cfg(test)]
mod tests;
