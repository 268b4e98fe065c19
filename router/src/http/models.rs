//! `/v1/models`.

use axum::{
    Json,
    extract::{Path, State},
};
use serde::Serialize;

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
}

fn describe(api: &Api, model: &ServedModel, name: &str) -> Model {
    Model {
        id: name.to_owned(),
        object: "model",
        created: api.since,
        owned_by: "tutti",
        max_model_len: model.max_model_len(),
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
