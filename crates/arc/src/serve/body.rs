//! Bodies of requests: how they are read, and how many are in memory and worked on at once.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::body::Body;
use futures_util::StreamExt;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use super::{HttpLimits, error::ApiError};

/// Bodies that are parsed and encoded side by side; the others wait, as long as their clients do.
pub const PREPARING: usize = 4;
/// Bytes of a body that every connection may have in memory, beside as many that it has not looked at.
pub(super) const SMALL: usize = 64 * 1024;
/// Bytes that larger bodies have in memory together, from their first to when they have been parsed, or as many as the largest may
/// have; what comes of others stays with their clients. Without it all connections could have as much as a body may.
const ROOM: usize = 256 << 20;

/// Whose turn it is.
#[derive(Debug)]
pub struct Turns {
    preparing: Arc<Semaphore>,
    /// A permit is for [`SMALL`] bytes.
    room: Arc<Semaphore>,
}

/// A body that has arrived, and its room.
#[derive(Debug, Default)]
pub struct Arrived {
    /// The body.
    pub bytes: Vec<u8>,
    room: Option<OwnedSemaphorePermit>,
}

impl Turns {
    /// Nobody has had any. `body_bytes`: of the largest body.
    pub fn new(body_bytes: usize) -> Turns {
        let room = ROOM.max(body_bytes).div_ceil(SMALL);
        Turns { preparing: Arc::new(Semaphore::new(PREPARING)), room: Arc::new(Semaphore::new(room)) }
    }

    /// One of the [`PREPARING`] turns, held until it is dropped.
    pub async fn prepare(&self) -> OwnedSemaphorePermit {
        self.preparing.clone().acquire_owned().await.expect("the semaphore is never closed")
    }

    /// Reads a body. Errors: 400 where it breaks off, 408 where its client takes longer than `read_timeout_s`, 413 behind
    /// `body_bytes`, 429 where it waits as long for room.
    pub async fn read(&self, limits: &HttpLimits, body: Body) -> Result<Arrived, ApiError> {
        let limit = Duration::from_secs(limits.read_timeout_s.into());
        let mut left = limit;
        let mut arrived = Arrived::default();
        let mut chunks = body.into_data_stream();
        loop {
            let began = Instant::now();
            let chunk = timeout(left, chunks.next()).await.map_err(|_| ApiError::too_slow(limits.read_timeout_s))?;
            left = left.saturating_sub(began.elapsed());
            let Some(chunk) = chunk else { return Ok(arrived) };
            let chunk = chunk.map_err(|e| ApiError::bad(format!("the body broke off: {e}")))?;
            let bytes = arrived.bytes.len() + chunk.len();
            if bytes > limits.body_bytes {
                return Err(ApiError::too_large(limits.body_bytes));
            }
            timeout(limit, self.make_room(&mut arrived, bytes)).await.map_err(|_| ApiError::overloaded(5))?;
            arrived.bytes.extend_from_slice(&chunk);
        }
    }

    async fn make_room(&self, arrived: &mut Arrived, bytes: usize) {
        let wanted = bytes.saturating_sub(SMALL).div_ceil(SMALL);
        let missing = wanted - arrived.room.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        if missing == 0 {
            return;
        }
        let missing = u32::try_from(missing).expect("a chunk of a body is smaller");
        let more = self.room.clone().acquire_many_owned(missing).await.expect("the semaphore is never closed");
        match &mut arrived.room {
            Some(room) => room.merge(more),
            none => *none = Some(more),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn large_bodies_wait_for_room_and_small_ones_for_nobody() {
        let body_bytes = ROOM / 4 + SMALL;
        let limits = HttpLimits {
            body_bytes,
            connections: 1,
            read_timeout_s: 1,
            request_timeout_s: 1,
            max_choices: 1,
            drain_s: 1,
        };
        let turns = Turns::new(body_bytes);
        // In pieces, so that room is added to room.
        let read = async |bytes: usize| {
            let pieces = [bytes / 2, bytes - bytes / 2].map(|n| Ok::<_, std::io::Error>(vec![b' '; n]));
            turns.read(&limits, Body::from_stream(futures_util::stream::iter(pieces))).await
        };
        let mut held = Vec::new();
        for _ in 0..4 {
            held.push(read(body_bytes).await.expect("there is room"));
        }
        assert_eq!(turns.room.available_permits(), 0);
        assert_eq!(read(SMALL).await.expect("it is small").bytes.len(), SMALL);
        assert_eq!(read(SMALL + 1).await.expect_err("there is no room").status, 429);
        let (late, ()) = tokio::join!(read(SMALL + 1), async {
            tokio::task::yield_now().await;
            held.clear();
        });
        assert_eq!(late.expect("there is room again").bytes.len(), SMALL + 1);
        assert_eq!(read(body_bytes + 1).await.expect_err("too large").status, 413);
        assert_eq!(turns.room.available_permits(), ROOM / SMALL, "nobody has any");
        let silent = Body::from_stream(futures_util::stream::pending::<Result<Vec<u8>, std::io::Error>>());
        assert_eq!(turns.read(&limits, silent).await.expect_err("nothing comes").status, 408);
    }
}
