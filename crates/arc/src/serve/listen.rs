//! Connections: how many there may be, how long they may be silent, and how they end.

use std::{sync::Arc, time::Duration};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::{net::TcpListener, sync::Semaphore};

use super::{
    App,
    body::SMALL,
    socket::{WriteTimeout, left},
};

/// Serves connections until `stop` resolves; then takes no more, and returns when the requests that run have been answered.
///
/// At most `connections` are open; more wait in the system's queue. A client has `read_timeout_s` for the head of a
/// request, and as long for a part of an answer, so that silent ones cannot hold places for ever.
pub(super) async fn serve(listener: TcpListener, router: Router, app: Arc<App>, stop: impl Future<Output = ()>) {
    let timeout = Duration::from_secs(app.http.read_timeout_s.into());
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(timeout).max_buf_size(SMALL);
    let service = TowerToHyperService::new(router);
    let places = Arc::new(Semaphore::new(app.http.connections));
    let graceful = GracefulShutdown::new();
    let mut stop = std::pin::pin!(stop);
    loop {
        let accepted = async {
            let place = places.clone().acquire_owned().await.expect("the semaphore is never closed");
            (listener.accept().await, place)
        };
        let (accepted, place) = tokio::select! {
            accepted = accepted => accepted,
            () = &mut stop => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of file descriptors, or a client that left while it waited: neither ends the server.
                tracing::warn!(%error, "a connection was not accepted");
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            }
        };
        // Tokens are small packets that must not wait for each other.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "no TCP_NODELAY");
        }
        let stream = Arc::new(stream);
        let io = TokioIo::new(WriteTimeout::new(stream.clone(), app.clone(), timeout));
        let connection = graceful.watch(http.serve_connection(io, service.clone()));
        tokio::spawn(async move {
            tokio::select! {
                ended = connection => if let Err(error) = ended {
                    tracing::debug!(%error, "a connection broke");
                },
                () = left(&stream) => tracing::debug!("a client left"),
            }
            drop(place);
        });
    }
    drop(listener);
    graceful.shutdown().await;
}
