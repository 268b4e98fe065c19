//! The one model that a cluster serves: told by the first worker that has loaded it, and held against by all others.

use std::sync::Arc;

use tutti_proto::{Rank, cluster::v1 as pb, declaration::ModelDeclaration};
use tutti_runtime::Error;

use super::{
    Cluster, State,
    roles::{self, GroupRole},
};
use crate::request::TextWalks;

/// As the first worker told it.
#[derive(Debug)]
pub struct ServedModel {
    /// Its `max_request_tokens` is the smallest of the ready workers'.
    pub description: Arc<pb::ModelDescription>,
    /// The same, checked.
    pub declaration: Arc<ModelDeclaration>,
    /// Of a request for text.
    pub walks: TextWalks,
    /// Of the planes of whoever told of some first, and its rank: who only encodes has none.
    layout: Option<(u64, Rank)>,
}

impl Cluster {
    /// Fills in what the conductor knows better, and holds later workers to the first one's declaration.
    pub(super) fn take_model(
        &self,
        state: &mut State,
        rank: Rank,
        ready: &pb::Ready,
    ) -> Result<pb::ModelDescription, Error> {
        let description = self.describe_better(ready.model.clone().unwrap_or_default())?;
        let Some(first) = &mut state.model else {
            let declaration = description.declaration.clone().unwrap_or_default();
            let declaration = ModelDeclaration::try_from(declaration).map_err(|e| {
                Error::internal(format!("its model's declaration does not hold together: {e}"))
            })?;
            let walks = TextWalks::of(&declaration)?;
            state.workers.take_roles(roles::roles(&self.limits.topology, &declaration, walks)?);
            let layout = state.workers.duties(rank).thinks.map(|_| (ready.layout_hash, rank));
            let (declaration, told) = (Arc::new(declaration), Arc::new(description.clone()));
            state.model = Some(ServedModel { description: told, declaration, walks, layout });
            return Ok(description);
        };
        if of_all_ranks(&first.description) != of_all_ranks(&description) {
            return Err(Error::invalid("model", "is another than that of the workers before it"));
        }
        if state.workers.duties(rank).thinks.is_none() {
            return Ok(description);
        }
        let (layout, other) = *first.layout.get_or_insert((ready.layout_hash, rank));
        if ready.layout_hash != layout && state.workers.has_role(GroupRole::Prefill) {
            let message = format!(
                "group {:?} keeps what is computed of a request in another layout than group {:?}: neither could go on \
                 with the other's",
                self.group_name(rank),
                self.group_name(other)
            );
            return Err(Error::invalid("topology", message));
        }
        Ok(description)
    }

    fn describe_better(&self, mut description: pb::ModelDescription) -> Result<pb::ModelDescription, Error> {
        description.served_name.clone_from(&self.served.name);
        description.has_tokenizer = self.served.has_tokenizer;
        if let Some(asked) = self.limits.max_model_len {
            let most = description.max_context_tokens;
            if asked > most {
                let message = format!("is {asked}, but the model's context holds {most} tokens");
                return Err(Error::invalid("max_model_len", message));
            }
            description.max_context_tokens = asked;
        }
        Ok(description)
    }

    /// The place of a rank's group in the topology.
    pub(crate) fn group_of(&self, rank: Rank) -> Option<usize> {
        self.limits.topology.replica_of(rank).map(|replica| replica.group)
    }

    /// The name of a rank's group.
    pub(super) fn group_name(&self, rank: Rank) -> &str {
        let topology = &self.limits.topology;
        topology.replica_of(rank).map_or("", |replica| topology.group_name(replica.group))
    }
}

/// A description without what groups of other sizes may have other values of: pools, and each rank's share of the planes,
/// for which the layout stands.
fn of_all_ranks(description: &pb::ModelDescription) -> pb::ModelDescription {
    let mut declaration = description.declaration.clone();
    if let Some(declaration) = &mut declaration {
        declaration.planes.clear();
    }
    pb::ModelDescription { max_request_tokens: 0, declaration, ..description.clone() }
}
