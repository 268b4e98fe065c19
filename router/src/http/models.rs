//! `/v1/models`.

use std::iter;

use axum::{
    Json,
    extract::{Path, State},
};
use serde::Serialize;
use tutti_proto::cluster::v1::MediaKind;

use super::{Api, error::ApiError};
use crate::served::ServedModel;

#[derive(Serialize)]
pub struct ModelList {
    object: &'static str,
    data: Vec<Model>,
}

#[derive(Serialize)]
pub struct Model {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// Most tokens of a request, prompt and output together, under vLLM's name.
    max_model_len: u32,
    /// Kinds of content that a chat may have, under OpenRouter's name: text, and kinds of media.
    input_modalities: Vec<&'static str>,
    /// Maximum size of a request in bytes.
    max_body_bytes: usize,
}

/// The kinds of media that a chat may contain, by their names.
const MODALITIES: [(MediaKind, &str); 3] =
    [(MediaKind::Image, "image"), (MediaKind::Audio, "audio"), (MediaKind::Video, "video")];

fn describe(api: &Api, model: &ServedModel, name: &str) -> Model {
    let inputs = model.media_inputs();
    let is_taken = |(kind, _): &&(MediaKind, &str)| inputs.iter().any(|input| input.kind == *kind);
    let media = MODALITIES.iter().filter(is_taken).map(|(_, name)| *name);
    Model {
        id: name.to_owned(),
        object: "model",
        created: api.since,
        owned_by: "tutti",
        max_model_len: model.max_model_len(),
        input_modalities: iter::once("text").chain(media).collect(),
        max_body_bytes: api.bodies.limit(),
    }
}

/// Lists the served model under each of its names.
pub async fn list(State(api): State<Api>) -> Result<Json<ModelList>, ApiError> {
    let model = api.generator.model()?;
    Ok(Json(ModelList {
        object: "list",
        data: model.names().map(|name| describe(&api, &model, name)).collect(),
    }))
}

/// Describes a model by its name, which may contain slashes.
pub async fn get(State(api): State<Api>, Path(name): Path<String>) -> Result<Json<Model>, ApiError> {
    let model = api.generator.model_named(Some(&name))?;
    Ok(Json(describe(&api, &model, &name)))
}
