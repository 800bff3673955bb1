//! The OpenAI-compatible server.
//!
//! A handler reads a body under a limit of bytes and of time, turns it into a [`job::Job`] off the async threads, submits
//! one sequence for each choice, and answers as tokens land. A client that goes away drops its [`run::Run`], which cancels.
//! Bodies, errors and streams have the shapes that the API's clients know.

pub mod api;
pub mod backend;
pub mod body;
pub mod ending;
pub mod error;
pub mod job;
mod listen;
pub mod metrics;
pub mod models;
pub mod reply;
pub mod run;
mod socket;
#[doc(hidden)]
pub mod testing;

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::Body,
    extract::{MatchedPath, Request, State},
    http::{Method, StatusCode, Uri, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use futures_util::StreamExt;
use serde_json::json;
use tokio::{net::TcpListener, time::Instant};

use crate::model_text::ModelText;
use backend::Backend;
use body::Turns;
use ending::{Ending, Stage};
use error::ApiError;
use metrics::Metrics;
use models::ServedModel;

/// Limits of the HTTP side.
#[derive(Debug, Clone, Copy)]
pub struct HttpLimits {
    /// Largest body in bytes.
    pub body_bytes: usize,
    /// Most connections.
    pub connections: usize,
    /// Seconds for the head of a request to arrive, for its body, and for a client to take some of what it is sent.
    pub read_timeout_s: u32,
    /// Seconds for the whole answer.
    pub request_timeout_s: u32,
    /// Most sequences of one request.
    pub max_choices: usize,
    /// Seconds that running requests have at the end.
    pub drain_s: u32,
}

/// What handlers share.
pub struct App {
    /// The engine.
    pub backend: Arc<dyn Backend>,
    /// Tokenizer and template.
    pub text: Arc<ModelText>,
    /// What `/v1/models` says.
    pub model: ServedModel,
    /// Limits.
    pub http: HttpLimits,
    /// Counters.
    pub metrics: Metrics,
    /// Whether the server is about to end.
    pub ending: Ending,
    /// Which bodies are read, and turned into what the engine runs.
    pub turns: Turns,
}

/// All routes.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/health", get(health))
        .route("/metrics", get(metrics_page))
        .fallback(|uri: Uri| async move { ApiError::no_such_route(uri.path()) })
        .method_not_allowed_fallback(|method: Method, uri: Uri| async move {
            ApiError::wrong_method(method.as_str(), uri.path())
        })
        .layer(middleware::from_fn_with_state(app.clone(), count))
        .with_state(app)
}

/// Left at the end for what has been said to be sent.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Serves until `stop` resolves or the engine fails, then lets running requests end, and their clients take the answers, for `drain_s`
/// seconds. Those that run longer end with an error; one that has not arrived as a whole is refused, or not waited for. Returns what
/// was wrong with the engine, if something was.
pub async fn serve(
    listener: TcpListener,
    app: Arc<App>,
    stop: impl Future<Output = ()> + Send + 'static,
) -> Option<String> {
    let stopped = app.ending.reached(Stage::Draining);
    let served = listen::serve(listener, router(app.clone()), app.clone(), stopped);
    let ended = async {
        tokio::select! {
            () = stop => {}
            () = engine_fault(app.backend.clone()) => {}
        }
        app.ending.reach(Stage::Draining);
        let drain = Duration::from_secs(app.http.drain_s.into());
        if tokio::time::timeout(drain, all_sent(&app.metrics)).await.is_err() {
            if !app.metrics.is_quiet() {
                tracing::warn!(drain_s = app.http.drain_s, "the drain is over; what still runs is ended");
            }
            app.ending.reach(Stage::Over);
            tokio::time::sleep(LAST_WORDS).await;
        }
    };
    tokio::select! {
        () = served => {}
        () = ended => {}
    }
    app.backend.fault()
}

/// Waits until all that was asked for has been answered, and sent.
async fn all_sent(metrics: &Metrics) {
    loop {
        while !metrics.is_quiet() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        // What was answered last may be on its way to where it would wait.
        tokio::time::sleep(LAST_WORDS).await;
        if metrics.is_quiet() {
            return;
        }
    }
}

async fn engine_fault(backend: Arc<dyn Backend>) {
    while backend.fault().is_none() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    answer(app, request, job::chat).await
}

async fn completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    answer(app, request, job::completion).await
}

async fn answer(
    app: Arc<App>,
    request: Request,
    prepare: fn(&App, &[u8]) -> Result<job::Job, ApiError>,
) -> Result<Response, ApiError> {
    let began = Instant::now();
    let body = app.ending.before(Stage::Draining, app.turns.read(&app.http, request.into_body())).await??;
    // What a client that left had sent is dropped here, and not worked through before others have their turn.
    let turn = app.ending.before(Stage::Over, app.turns.prepare()).await?;
    // Parsing and encoding are work in proportion to the body: not for the threads that answer everybody.
    let preparing = tokio::task::spawn_blocking({
        let app = app.clone();
        move || {
            let prepared = prepare(&app, &body.bytes);
            drop(turn);
            prepared
        }
    });
    let prepared = app.ending.before(Stage::Over, preparing).await?;
    let job = prepared.map_err(|e| ApiError::failed(format!("preparing the request failed: {e}")))??;
    reply::reply(app, job, began).await
}

async fn health(State(app): State<Arc<App>>) -> Response {
    match (app.backend.fault(), app.ending.is(Stage::Draining)) {
        (Some(fault), _) => {
            (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": "failed", "error": fault}))).into_response()
        }
        (None, true) => (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": "draining"}))).into_response(),
        (None, false) => Json(json!({"status": "ok"})).into_response(),
    }
}

async fn metrics_page(State(app): State<Arc<App>>) -> Response {
    let page = app.metrics.render(&app.backend.stats(), &app.model.name);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response()
}

/// Counts a request when it is answered, and as in flight until its body has been sent or dropped.
async fn count(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    struct InFlight(Arc<App>);
    impl Drop for InFlight {
        fn drop(&mut self) {
            self.0.metrics.end();
        }
    }
    app.metrics.begin();
    let in_flight = InFlight(app.clone());
    let route = match request.extensions().get::<MatchedPath>().map(MatchedPath::as_str) {
        Some("/v1/chat/completions") => "/v1/chat/completions",
        Some("/v1/completions") => "/v1/completions",
        Some("/health") => "/health",
        Some("/metrics") => "/metrics",
        Some(path) if path.starts_with("/v1/models") => "/v1/models",
        _ => "other",
    };
    let response = next.run(request).await;
    app.metrics.answered(route, response.status().as_u16());
    let (parts, body) = response.into_parts();
    let body = body.into_data_stream().map(move |chunk| {
        let _held = &in_flight;
        chunk
    });
    Response::from_parts(parts, Body::from_stream(body))
}
