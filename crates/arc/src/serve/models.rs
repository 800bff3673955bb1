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
    pub format: String,
    /// Parameters.
    pub parameters: u64,
    /// Where marketplaces find the model's card: a name of the hub.
    pub hugging_face_id: Option<String>,
    /// Dollars a token of the prompt and of the answer, as text, so that no digit changes.
    pub prices: [String; 2],
}

impl ServedModel {
    /// The name in the API of a model that was named so on the command line: that of its file or folder.
    pub fn name_of(given: &str) -> String {
        let path = given.trim_end_matches('/');
        let last = path.rsplit('/').next().unwrap_or(path);
        let name = last.strip_suffix(".gguf").or_else(|| last.strip_suffix(".GGUF")).unwrap_or(last);
        if name.is_empty() { given.to_owned() } else { name.to_owned() }
    }

    /// A price as the configuration has it. Errors: it is no amount.
    pub fn price(name: &str, text: &str) -> Result<String, String> {
        let plain = !text.is_empty() && text.len() <= 40 && text.chars().all(|c| c.is_ascii_digit() || c == '.');
        if plain && text.parse::<f64>().is_ok() {
            return Ok(text.to_owned());
        }
        Err(format!("the setting `{name}` is {text:?}, must be dollars a token, such as 0.0000002"))
    }

    /// The format in the words of marketplaces, which have none for formats between these.
    fn quantization(&self) -> &'static str {
        match self.format.as_str() {
            "f32" => "fp32",
            "f16" => "fp16",
            "bf16" => "bf16",
            "f8_e4m3" => "fp8",
            "mxfp4" => "fp4",
            "q8_0" => "int8",
            "q4_0" | "q4_1" | "q4_k" => "int4",
            _ => "unknown",
        }
    }
}

fn describe(app: &App) -> Value {
    let limits = app.backend.limits();
    let context = limits.context.min(limits.kv_tokens);
    let [prompt, completion] = &app.model.prices;
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
        "quantization": app.model.quantization(),
        "format": app.model.format,
        "hugging_face_id": app.model.hugging_face_id,
        "input_modalities": ["text"],
        "output_modalities": ["text"],
        "context_length": context,
        "max_output_length": context,
        "pricing": {"prompt": prompt, "completion": completion, "image": "0", "request": "0"},
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_files_and_prices_are_amounts() {
        for (given, name) in [
            ("smollm2-135m", "smollm2-135m"),
            ("/models/V4-Flash-IQ2.gguf", "V4-Flash-IQ2"),
            ("./release/", "release"),
            ("synthetic:deepseek-v4-flash", "synthetic:deepseek-v4-flash"),
            ("/", "/"),
        ] {
            assert_eq!(ServedModel::name_of(given), name);
        }
        assert_eq!(ServedModel::price("price_prompt", "0.00000020"), Ok("0.00000020".to_owned()));
        for wrong in ["", "free", "-1", "1e-6", "0,1", "1.2.3", "."] {
            assert!(ServedModel::price("price_prompt", wrong).is_err(), "{wrong}");
        }
    }
}
