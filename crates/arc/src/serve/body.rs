//! Bodies of requests: how they are read, and how many are in memory and worked on at once.

use std::{sync::Arc, time::Duration};

use axum::body::Body;
use futures_util::StreamExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{HttpLimits, error::ApiError};

/// Bodies that are parsed and encoded side by side; the others wait, as long as their clients do.
pub const PREPARING: usize = 4;
/// Bytes of a body that every connection may have in memory.
const SMALL: usize = 64 * 1024;
/// Larger bodies that are in memory at once, until they have been parsed; what comes of others stays with their clients, who have the
/// time that any body has. Without it there would be as many as there are connections.
const LARGE: usize = 32;

/// Whose turn it is.
#[derive(Debug)]
pub struct Turns {
    preparing: Arc<Semaphore>,
    large: Arc<Semaphore>,
}

impl Default for Turns {
    fn default() -> Turns {
        Turns { preparing: Arc::new(Semaphore::new(PREPARING)), large: Arc::new(Semaphore::new(LARGE)) }
    }
}

/// A body that has arrived, and its place among the large ones.
#[derive(Debug)]
pub struct Arrived {
    /// The body.
    pub bytes: Vec<u8>,
    _place: Option<OwnedSemaphorePermit>,
}

impl Turns {
    /// One of the [`PREPARING`] turns, held until it is dropped.
    pub async fn prepare(&self) -> OwnedSemaphorePermit {
        take(&self.preparing).await
    }

    /// Reads a body. Errors: 400 where it breaks off, 408 after `read_timeout_s`, 413 behind `body_bytes`.
    pub async fn read(&self, limits: &HttpLimits, body: Body) -> Result<Arrived, ApiError> {
        let read = async {
            let mut arrived = Arrived { bytes: Vec::new(), _place: None };
            let mut chunks = body.into_data_stream();
            while let Some(chunk) = chunks.next().await {
                let chunk = chunk.map_err(|e| ApiError::bad(format!("the body broke off: {e}")))?;
                let bytes = arrived.bytes.len() + chunk.len();
                if bytes > limits.body_bytes {
                    return Err(ApiError::too_large(limits.body_bytes));
                }
                if bytes > SMALL && arrived._place.is_none() {
                    arrived._place = Some(take(&self.large).await);
                }
                arrived.bytes.extend_from_slice(&chunk);
            }
            Ok(arrived)
        };
        let timeout = Duration::from_secs(limits.read_timeout_s.into());
        tokio::time::timeout(timeout, read).await.unwrap_or(Err(ApiError::too_slow(limits.read_timeout_s)))
    }
}

async fn take(turns: &Arc<Semaphore>) -> OwnedSemaphorePermit {
    turns.clone().acquire_owned().await.expect("the semaphore is never closed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn large_bodies_wait_for_one_another_and_small_ones_for_nobody() {
        let limits = HttpLimits {
            body_bytes: 2 * SMALL,
            connections: 1,
            read_timeout_s: 1,
            request_timeout_s: 1,
            max_choices: 1,
            drain_s: 1,
        };
        let turns = Turns::default();
        let read = async |bytes: usize| turns.read(&limits, Body::from(vec![b' '; bytes])).await;
        let mut held = Vec::new();
        for _ in 0..LARGE {
            held.push(read(SMALL + 1).await.expect("there is room"));
        }
        assert_eq!(read(SMALL).await.expect("it is small").bytes.len(), SMALL);
        assert_eq!(read(SMALL + 1).await.expect_err("all places are taken").status, 408);
        let (late, _) = tokio::join!(read(SMALL + 1), async {
            tokio::task::yield_now().await;
            drop(held.pop());
        });
        assert_eq!(late.expect("a place is free").bytes.len(), SMALL + 1);
        held.clear();
        assert_eq!(read(2 * SMALL + 1).await.expect_err("too large").status, 413);
    }
}
