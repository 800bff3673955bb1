//! Errors as clients of the API know them: `{"error": {"message", "type", "param", "code"}}`.

use arc_engine::{engine::SubmitError, request::RequestError};
use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

/// A refusal or a failure, ready to be sent.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// What happened and what to do.
    pub message: String,
    /// The field that is wrong, as a path into the body.
    pub param: Option<String>,
    /// A word for programs.
    pub code: Option<&'static str>,
    /// Seconds after which the request is worth another try.
    pub retry_after_s: Option<u64>,
}

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError { status, message: message.into(), param: None, code: None, retry_after_s: None }
    }

    /// 400: the request is wrong.
    pub fn bad(message: impl Into<String>) -> ApiError {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// 400: this field is wrong.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError { param: Some(param.into()), ..Self::bad(message) }
    }

    /// 400: a field of the API that this server does not implement.
    pub fn unsupported(param: &str) -> ApiError {
        ApiError { code: Some("unsupported_parameter"), ..Self::field(param, format!("{param} is not supported here")) }
    }

    /// 404: another model.
    pub fn no_such_model(asked: &str, served: &str) -> ApiError {
        ApiError {
            param: Some("model".to_owned()),
            code: Some("model_not_found"),
            ..Self::new(StatusCode::NOT_FOUND, format!("model {asked:?} is not served here; {served:?} is"))
        }
    }

    /// 404: no such path.
    pub fn no_such_route(path: &str) -> ApiError {
        Self::new(StatusCode::NOT_FOUND, format!("there is nothing at {path}"))
    }

    /// 405.
    pub fn wrong_method(method: &str, path: &str) -> ApiError {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, format!("{path} does not take {method}"))
    }

    /// 413.
    pub fn too_large(limit: usize) -> ApiError {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body is larger than {limit} bytes"))
    }

    /// 408: the body did not arrive in time.
    pub fn too_slow(seconds: u32) -> ApiError {
        Self::new(StatusCode::REQUEST_TIMEOUT, format!("the body did not arrive within {seconds} s"))
    }

    /// 429.
    pub fn overloaded(retry_after_s: u64) -> ApiError {
        ApiError {
            code: Some("overloaded"),
            retry_after_s: Some(retry_after_s),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, "the server is full; try again later")
        }
    }

    /// 503: the server is about to end or its device has failed.
    pub fn unavailable(message: impl Into<String>) -> ApiError {
        ApiError { retry_after_s: Some(5), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) }
    }

    /// 503: the server takes nothing new, or does not wait for what runs.
    pub fn shutting_down() -> ApiError {
        Self::unavailable("the server is shutting down")
    }

    /// 500: the request was fine, its sequence failed.
    pub fn failed(message: impl Into<String>) -> ApiError {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// 504: the request took longer than it may.
    pub fn timed_out(seconds: u32) -> ApiError {
        ApiError {
            code: Some("timeout"),
            ..Self::new(StatusCode::GATEWAY_TIMEOUT, format!("the request took longer than {seconds} s"))
        }
    }

    /// The body, which is also the payload of an error in the middle of a stream.
    pub fn body(&self) -> Value {
        let kind = match self.status.as_u16() {
            429 => "rate_limit_error",
            404 => "not_found_error",
            400..500 => "invalid_request_error",
            _ => "server_error",
        };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

impl From<SubmitError> for ApiError {
    fn from(e: SubmitError) -> ApiError {
        match e {
            SubmitError::Invalid(e) => e.into(),
            SubmitError::Full { retry_after_ms, .. } => ApiError::overloaded(retry_after_ms.div_ceil(1000).max(1)),
            other => ApiError::unavailable(other.to_string()),
        }
    }
}

impl From<RequestError> for ApiError {
    fn from(e: RequestError) -> ApiError {
        // The engine calls them stop ids; the API has another name for its part of them.
        if let RequestError::TokenOutOfRange { field: "stop_ids", .. }
        | RequestError::TooMany { field: "stop_ids", .. } = &e
        {
            return ApiError::field("stop_token_ids", e.to_string().replacen("stop_ids", "stop_token_ids", 1));
        }
        let (param, code) = match &e {
            RequestError::EmptyPrompt => ("prompt", None),
            RequestError::TokenOutOfRange { field, .. }
            | RequestError::OutOfRange { field, .. }
            | RequestError::TooMany { field, .. } => (*field, None),
            RequestError::ContextExceeded { .. } | RequestError::KvExceeded { .. } => {
                ("max_tokens", Some("context_length_exceeded"))
            }
        };
        ApiError { code, ..ApiError::field(param, e.to_string()) }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
