//! Which worker graphs a request consists of, derived from what the model declares.

use tutti_proto::{
    GraphId,
    declaration::{ModelDeclaration, WalkId, WalkKind},
};
use tutti_runtime::Error;

/// The walks of a request whose input is tokens alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextWalks {
    /// Over the decode walk's own nodes.
    pub prefill: WalkId,
    /// Its loop stays in one worker.
    pub decode: WalkId,
}

impl TextWalks {
    /// As the model declares them.
    pub fn of(model: &ModelDeclaration) -> Result<Self, Error> {
        let decode = model
            .find_walk(|walk| matches!(walk.kind, WalkKind::Decode { .. }))
            .ok_or_else(|| Error::internal("the model declares no decode walk"))?;
        let nodes = model.walk(decode).map(|walk| &walk.nodes);
        let prefill = model
            .find_walk(|walk| {
                matches!(walk.kind, WalkKind::Chunkable { .. } | WalkKind::Atomic { .. })
                    && Some(&walk.nodes) == nodes
            })
            .ok_or_else(|| {
                Error::internal("the model declares no prefill walk over the decode walk's nodes")
            })?;
        Ok(Self { prefill, decode })
    }
}

/// A worker graph: the part of a request that one worker (or TP group) runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GraphRole {
    /// All of it.
    Whole,
    /// The prefill, handed over unless the output has no second token.
    Prefill,
    /// What is handed over.
    Decode,
    /// The encoding of its media, handed over to whichever part prefills.
    Encode,
}

impl GraphRole {
    /// Its place among the request's graphs.
    pub fn id(self) -> GraphId {
        GraphId(match self {
            Self::Whole | Self::Prefill => 0,
            Self::Decode => 1,
            Self::Encode => 2,
        })
    }

    /// In the order in which they run; `encoders` are those of the request's media.
    pub fn walks(self, text: TextWalks, encoders: &[WalkId]) -> Vec<u32> {
        match self {
            Self::Whole => vec![text.prefill.0, text.decode.0],
            Self::Prefill => vec![text.prefill.0],
            Self::Decode => vec![text.decode.0],
            Self::Encode => encoders.iter().map(|walk| walk.0).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use tutti_proto::declaration::{NodeId, Walk};

    use super::*;

    fn walk(name: &str, nodes: &[u32], kind: WalkKind) -> Walk {
        Walk { name: name.into(), nodes: nodes.iter().copied().map(NodeId).collect(), kind }
    }

    #[test]
    fn a_text_request_passes_no_encoder() {
        let batched_by = WalkId(3);
        let encoders = [WalkId(0)];
        let omni = ModelDeclaration::new(
            vec!["audio_encoder".into(), "thinker".into()],
            vec![
                walk("prefill_audio", &[0], WalkKind::Atomic { batched_by }),
                walk("prefill_text", &[1], WalkKind::Chunkable { batched_by }),
                walk("thinker_decode", &[1], WalkKind::Decode { batched_by }),
                walk("thinker_step", &[1], WalkKind::Mixed),
            ],
            vec![],
        );
        let text = TextWalks::of(&omni.unwrap()).unwrap();
        assert_eq!(text, TextWalks { prefill: WalkId(1), decode: WalkId(2) });
        let walks = |role: GraphRole| role.walks(text, &encoders);
        assert_eq!(walks(GraphRole::Whole), [1, 2]);
        assert_eq!(
            (walks(GraphRole::Prefill), walks(GraphRole::Decode), walks(GraphRole::Encode)),
            (vec![1], vec![2], vec![0])
        );
        assert_ne!(GraphRole::Prefill.id(), GraphRole::Decode.id());
        assert_ne!(GraphRole::Prefill.id(), GraphRole::Encode.id());
    }

    #[test]
    fn a_model_without_a_decode_walk_is_refused() {
        let model = ModelDeclaration::new(vec!["n".into()], vec![walk("m", &[0], WalkKind::Mixed)], vec![]);
        assert!(TextWalks::of(&model.unwrap()).is_err());
    }
}
