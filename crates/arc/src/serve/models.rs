//! `/v1/models`: what is served, with the fields that a marketplace of providers asks for.

use std::sync::Arc;

use axum::{
    Json,
    extract::{Path, State, rejection::PathRejection},
};
use serde_json::{Value, json};

use super::{App, error::ApiError};

/// Sampler parameters that the API takes, under the names that it takes them by.
pub const SAMPLING_PARAMETERS: [&str; 14] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "max_tokens",
    "min_tokens",
    "seed",
    "stop",
];

/// What is said of the model.
#[derive(Debug, Clone)]
pub struct ServedModel {
    /// Name in the API.
    pub name: String,
    /// Name for people, from the file.
    pub title: String,
    /// Seconds since 1970 when the model was loaded.
    pub created: u64,
    /// Format that most weight bytes have, as `q4_1`.
    pub quantization: String,
    /// Parameters.
    pub parameters: u64,
}

fn describe(app: &App) -> Value {
    let limits = app.backend.limits();
    let context = limits.context.min(limits.kv_tokens);
    let features: &[&str] = match (app.text.takes_tools(), app.text.has_template()) {
        (true, _) => &["tools", "reasoning", "json_mode", "structured_outputs"],
        (false, true) => &["json_mode", "structured_outputs"],
        (false, false) => &[],
    };
    json!({
        "id": app.model.name,
        "object": "model",
        "created": app.model.created,
        "owned_by": "arc",
        "name": app.model.title,
        "parameters": app.model.parameters,
        "quantization": app.model.quantization,
        "input_modalities": ["text"],
        "output_modalities": ["text"],
        "context_length": context,
        "max_output_length": context,
        "pricing": {"prompt": "0", "completion": "0", "image": "0", "request": "0", "input_cache_read": "0"},
        "supported_sampling_parameters": SAMPLING_PARAMETERS,
        "supported_features": features,
    })
}

/// The list, of one.
pub async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [describe(&app)]}))
}

/// One model by name.
pub async fn one(
    State(app): State<Arc<App>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(id) = id.map_err(|rejection| ApiError::bad(rejection.body_text()))?;
    if id == app.model.name {
        Ok(Json(describe(&app)))
    } else {
        Err(ApiError::no_such_model(&id.chars().take(100).collect::<String>(), &app.model.name))
    }
}
