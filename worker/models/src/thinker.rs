//! What a text model with one node declares, whoever runs it.

use tutti_proto::walks::{
    DeclarationError, ModelDeclaration, NodeId, Plane, PlaneKind, Walk, WalkId, WalkKind,
};

/// One node; text prefill and decode, batched together; one plane of paged keys and values.
pub(crate) fn declaration(
    page_tokens: usize,
    bytes_per_token: usize,
) -> Result<ModelDeclaration, DeclarationError> {
    let batched_by = WalkId(2);
    let walk = |name: &str, kind| Walk { name: name.into(), nodes: vec![NodeId(0)], kind };
    let kind =
        PlaneKind::PagedKv { page_tokens: page_tokens as u32, bytes_per_token: bytes_per_token as u64 };
    ModelDeclaration::new(
        vec!["thinker".into()],
        vec![
            walk("prefill_text", WalkKind::Chunkable { batched_by }),
            walk("thinker_decode", WalkKind::Decode { batched_by }),
            walk("thinker_step", WalkKind::Mixed),
        ],
        vec![Plane { name: "kv".into(), kind }],
    )
}
