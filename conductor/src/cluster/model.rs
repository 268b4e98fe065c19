//! The model that the cluster serves. The first worker that loads the model declares it. All other workers must declare
//! the same model.

use std::sync::Arc;

use tutti_proto::{Rank, cluster::v1 as pb, declaration::ModelDeclaration};
use tutti_runtime::Error;

use super::{
    Served,
    membership::Membership,
    roles::{self, GroupRole},
};
use crate::request::TextWalks;

/// The served model, as declared by the first worker that loaded it.
#[derive(Debug)]
pub struct ServedModel {
    /// The first worker's description, but with the smallest `max_request_tokens` of all ready workers.
    pub description: Arc<pb::ModelDescription>,
    /// The description's `declaration`, validated.
    pub declaration: Arc<ModelDeclaration>,
    /// The walks that prefill and decode text.
    pub walks: TextWalks,
    /// The planes of the first worker that has any. `None` while all loaded workers only encode, since such workers
    /// have no planes.
    planes: Option<HeldPlanes>,
    /// The last request limit below the context that was warned of.
    pub warned_limit: Option<u32>,
}

/// The planes of a worker.
#[derive(Clone, Debug)]
struct HeldPlanes {
    rank: Rank,
    /// Hash of the layout that the planes have on the wire.
    layout_hash: u64,
    /// The type of each paged plane's elements, by the plane's name.
    element_types: Vec<(String, pb::ElementType)>,
}

impl HeldPlanes {
    fn of(rank: Rank, ready: &pb::Ready) -> Self {
        let declaration = ready.model.as_ref().and_then(|model| model.declaration.as_ref());
        let element_type = |plane: &pb::Plane| match &plane.kind {
            Some(pb::plane::Kind::Paged(paged)) => Some((plane.name.clone(), paged.element_type())),
            _ => None,
        };
        let planes = declaration.into_iter().flat_map(|declaration| &declaration.planes);
        let element_types = planes.filter_map(element_type).collect();
        Self { rank, layout_hash: ready.layout_hash, element_types }
    }

    /// Returns the first plane whose elements are of another type in `other`, and the type there.
    fn other_type<'a>(&'a self, other: &'a Self) -> Option<(&'a str, [pb::ElementType; 2])> {
        let types = self.element_types.iter().zip(&other.element_types);
        let mut unlike = types.filter(|(own, other)| own.1 != other.1);
        unlike.next().map(|(own, other)| (own.0.as_str(), [own.1, other.1]))
    }
}

/// The parts of the model that the validation of a new request needs.
pub struct ModelView {
    pub description: Arc<pb::ModelDescription>,
    pub declaration: Arc<ModelDeclaration>,
    pub walks: TextWalks,
    /// True if prefix locality can affect placement.
    pub has_choice: bool,
}

impl Membership {
    /// The served model, or an error that says what is not ready.
    pub fn model_view(&self) -> Result<ModelView, Error> {
        let model = self.model.as_ref().ok_or_else(|| Error::unavailable(self.why_not_ready()))?;
        Ok(ModelView {
            description: model.description.clone(),
            declaration: model.declaration.clone(),
            walks: model.walks,
            has_choice: self.workers.have_choice(),
        })
    }

    /// Accepts the model of a worker that has loaded it. The first model becomes the cluster's model. A later model is
    /// accepted only if it agrees with the cluster's model. Returns the worker's description, completed with the
    /// conductor's settings.
    pub(super) fn accept_model(
        &mut self,
        rank: Rank,
        ready: &pb::Ready,
    ) -> Result<pb::ModelDescription, Error> {
        let description =
            complete(ready.model.clone().unwrap_or_default(), &self.served, self.limits.model.max_model_len)?;
        let Some(first) = &mut self.model else {
            let declaration = description.declaration.clone().unwrap_or_default();
            let declaration = ModelDeclaration::try_from(declaration)
                .map_err(|e| Error::internal(format!("the worker's model declaration is invalid: {e}")))?;
            let walks = TextWalks::of(&declaration)?;
            self.workers.set_roles(roles::roles(&self.limits.topology, &declaration, walks)?);
            let planes = self.workers.duties(rank).thinks.map(|_| HeldPlanes::of(rank, ready));
            let (declaration, shared) = (Arc::new(declaration), Arc::new(description.clone()));
            self.model =
                Some(ServedModel { description: shared, declaration, walks, planes, warned_limit: None });
            return Ok(description);
        };
        if of_all_ranks(&first.description) != of_all_ranks(&description) {
            return Err(Error::invalid("model", "is another than that of the workers before it"));
        }
        if self.workers.duties(rank).thinks.is_none() {
            return Ok(description);
        }
        let own = HeldPlanes::of(rank, ready);
        let other = first.planes.get_or_insert_with(|| own.clone());
        let group_of = |rank| self.limits.topology.group_name_of(rank);
        let (group, other_group) = (group_of(rank), group_of(other.rank));
        if let Some((plane, [of_own, of_other])) = own.other_type(other) {
            let [of_own, of_other] = [of_own, of_other].map(|element_type| element_type.as_str_name());
            let message = format!(
                "worker {} of group {group:?} stores the elements of plane {plane:?} as {of_own}, but worker {} of \
                 group {other_group:?} as {of_other}: a request's answer would depend on its worker",
                rank.0, other.rank.0
            );
            return Err(Error::invalid("kv_cache_dtype", message));
        }
        if own.layout_hash != other.layout_hash && self.workers.has_role(GroupRole::Prefill) {
            let message = format!(
                "group {group:?} keeps a request's planes in another layout than group {other_group:?}, so neither \
                 could continue the other's requests"
            );
            return Err(Error::invalid("topology", message));
        }
        Ok(description)
    }
}

/// Fills in a worker's description from the conductor's settings.
fn complete(
    mut description: pb::ModelDescription,
    served: &Served,
    max_model_len: Option<u32>,
) -> Result<pb::ModelDescription, Error> {
    if let Some((name, aliases)) = served.names.split_first() {
        description.served_name.clone_from(name);
        description.aliases = aliases.to_vec();
    }
    description.has_tokenizer = served.has_tokenizer;
    if let Some(asked) = max_model_len {
        let most = description.max_context_tokens;
        if asked > most {
            let message = format!("is {asked}, but the model's context holds {most} tokens");
            return Err(Error::invalid("max_model_len", message));
        }
        description.max_context_tokens = asked;
    }
    Ok(description)
}

/// Reduces a description to the parts that all ranks must agree on. Groups may differ in `max_request_tokens`, which
/// depends on the size of the KV pool, and in the share of the planes that each rank holds. The planes are compared by
/// their layout hash instead.
fn of_all_ranks(description: &pb::ModelDescription) -> pb::ModelDescription {
    let mut declaration = description.declaration.clone();
    if let Some(declaration) = &mut declaration {
        declaration.planes.clear();
    }
    pb::ModelDescription { max_request_tokens: 0, declaration, ..description.clone() }
}
