//! Which worker graphs a request consists of, derived from what the model declares.

use tutti_proto::walks::{ModelDeclaration, WalkId, WalkKind};
use tutti_runtime::Error;

/// The part of a request that one worker (or TP group) runs: walks in the order in which they run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraphPlan {
    /// The last may be a decode walk, whose loop stays in the worker.
    pub walks: Vec<WalkId>,
}

/// The walks of a request whose input is tokens alone: the prefill over the decode walk's own nodes, then the decode.
pub fn text_walks(model: &ModelDeclaration) -> Result<Vec<WalkId>, Error> {
    let decode = model
        .find_walk(|walk| matches!(walk.kind, WalkKind::Decode { .. }))
        .ok_or_else(|| Error::internal("the model declares no decode walk"))?;
    let nodes = model.walk(decode).map(|walk| &walk.nodes);
    let prefill = model
        .find_walk(|walk| {
            matches!(walk.kind, WalkKind::Chunkable { .. } | WalkKind::Atomic { .. })
                && Some(&walk.nodes) == nodes
        })
        .ok_or_else(|| Error::internal("the model declares no prefill walk over the decode walk's nodes"))?;
    Ok(vec![prefill, decode])
}

/// Cuts walks into worker graphs: neighbours that the same group of workers serves stay together.
pub fn worker_graphs<G: PartialEq>(walks: &[WalkId], served_by: impl Fn(WalkId) -> G) -> Vec<GraphPlan> {
    walks
        .chunk_by(|a, b| served_by(*a) == served_by(*b))
        .map(|walks| GraphPlan { walks: walks.to_vec() })
        .collect()
}

#[cfg(test)]
mod tests {
    use tutti_proto::walks::{NodeId, Walk};

    use super::*;

    fn walk(name: &str, nodes: &[u32], kind: WalkKind) -> Walk {
        Walk { name: name.into(), nodes: nodes.iter().copied().map(NodeId).collect(), kind }
    }

    fn omni() -> ModelDeclaration {
        let batched_by = WalkId(3);
        ModelDeclaration::new(
            vec!["audio_encoder".into(), "thinker".into()],
            vec![
                walk("prefill_audio", &[0, 1], WalkKind::Atomic { batched_by }),
                walk("prefill_text", &[1], WalkKind::Chunkable { batched_by }),
                walk("thinker_decode", &[1], WalkKind::Decode { batched_by }),
                walk("thinker_step", &[1], WalkKind::Mixed),
            ],
            vec![],
        )
        .unwrap()
    }

    #[test]
    fn a_text_request_passes_no_encoder() {
        assert_eq!(text_walks(&omni()).unwrap(), [WalkId(1), WalkId(2)]);
    }

    #[test]
    fn walks_of_one_group_are_one_graph_and_of_two_groups_are_two() {
        let walks = [WalkId(0), WalkId(1), WalkId(2)];
        let together = worker_graphs(&walks, |_| 0);
        assert_eq!(together, [GraphPlan { walks: walks.to_vec() }]);
        let decode_apart = worker_graphs(&walks, |walk| walk == WalkId(2));
        assert_eq!(
            decode_apart,
            [GraphPlan { walks: vec![WalkId(0), WalkId(1)] }, GraphPlan { walks: vec![WalkId(2)] }]
        );
    }

    #[test]
    fn a_model_without_a_decode_walk_is_refused() {
        let model = ModelDeclaration::new(vec!["n".into()], vec![walk("m", &[0], WalkKind::Mixed)], vec![]);
        assert!(text_walks(&model.unwrap()).is_err());
    }
}
