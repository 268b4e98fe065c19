//! The worker graphs of a request, derived from the model's declaration.

use tutti_proto::{
    GraphId,
    declaration::{ModelDeclaration, WalkId, WalkKind},
};
use tutti_runtime::Error;

/// The walks (named passes over the model's nodes) that prefill and decode text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextWalks {
    /// The prefill walk over the same nodes as the decode walk.
    pub prefill: WalkId,
    /// The decode walk. All its iterations for a request run on one worker.
    pub decode: WalkId,
}

impl TextWalks {
    /// Returns the walks that the model declares, or an error if the model declares no decode walk or no prefill walk.
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

/// The role of a worker graph: the part of a request that one worker (or TP group) runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GraphRole {
    /// The whole request.
    Whole,
    /// The prefill, which is handed over unless the output has only one token.
    Prefill,
    /// The decode of a handed-over prefill.
    Decode,
    /// The encoding of media, which is handed over to the graph that prefills.
    Encode,
}

impl GraphRole {
    /// The graph's id within its request.
    pub fn id(self) -> GraphId {
        GraphId(match self {
            Self::Whole | Self::Prefill => 0,
            Self::Decode => 1,
            Self::Encode => 2,
        })
    }

    /// The role's name in traces.
    pub fn name(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Encode => "encode",
        }
    }

    /// The graph's walks in the order in which they run. `encoders` are the walks that encode the request's media.
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
mod tests;
