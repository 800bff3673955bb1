//! Large uploads: through pinned memory, in pieces, so that one is read from the file while the one before it travels.

use std::ops::Range;
use std::sync::Arc;

use super::driver::{self, Driver};
use super::{Cuda, alloc_zeroed};
use crate::error::Result;

/// Two pieces of pinned memory and one on the device. Lives while weights are loaded.
pub struct Chute {
    pinned: [*mut u8; 2],
    device: u64,
    bytes: usize,
    next: usize,
    driver: Arc<Driver>,
}

// SAFETY: the pointers are this value's own.
unsafe impl Send for Chute {}

impl Chute {
    fn new(driver: &Arc<Driver>, bytes: usize) -> Result<Chute> {
        let (first, _) = driver.alloc_pinned(bytes)?;
        let mut chute = Chute { pinned: [first, first], device: 0, bytes, next: 0, driver: driver.clone() };
        chute.pinned[1] = driver.alloc_pinned(bytes)?.0;
        chute.device = alloc_zeroed(driver, "uploads", bytes)?;
        Ok(chute)
    }
}

impl Drop for Chute {
    fn drop(&mut self) {
        // Nothing may be on its way; an error has no one to go to.
        let _ = self.driver.synchronize("upload");
        // SAFETY: each was allocated once in `new`, and the stream is idle.
        unsafe {
            driver::free_pinned(self.pinned[0]);
            if self.pinned[1] != self.pinned[0] {
                driver::free_pinned(self.pinned[1]);
            }
            if self.device != 0 {
                self.driver.free(self.device);
            }
        }
    }
}

/// What is done with a piece: its address on the device, and which bytes it is.
type Then<'a> = &'a mut dyn FnMut(&mut Cuda, u64, Range<usize>) -> Result<()>;

impl Cuda {
    /// Device memory for a piece of `bytes` that is made there, until the next piece. Load time only.
    pub(crate) fn piece_room(&mut self, bytes: usize) -> Result<u64> {
        self.enter()?;
        if self.chute.as_ref().is_none_or(|chute| chute.bytes < bytes) {
            self.chute = None;
            self.chute = Some(Chute::new(&self.driver, bytes)?);
        }
        Ok(self.chute.as_ref().expect("made above").device)
    }

    /// Sends `bytes` in pieces of at most `piece` of them. `then(dev, at, range)` is called for each when it is enqueued
    /// at the device address `at`, where it stays until the work that `then` enqueues is done. Load time only.
    pub(crate) fn send_pieces(&mut self, bytes: &[u8], piece: usize, then: Then<'_>) -> Result<()> {
        self.piece_room(piece)?;
        for start in (0..bytes.len()).step_by(piece) {
            let range = start..bytes.len().min(start + piece);
            let chute = self.chute.as_mut().expect("made above");
            let (pinned, device) = (chute.pinned[chute.next], chute.device);
            chute.next ^= 1;
            // The other piece may be travelling; this one's copy was waited for before the other's was enqueued.
            // SAFETY: `piece` bytes of pinned memory that no copy reads.
            let room = unsafe { std::slice::from_raw_parts_mut(pinned, range.len()) };
            fill(room, &bytes[range.clone()]);
            self.counters.syncs += 1;
            self.driver.synchronize("upload")?;
            self.counters.h2d_copies += 1;
            self.counters.h2d_bytes += range.len() as u64;
            self.driver.copy_in(device, pinned, range.len(), "upload")?;
            then(self, device, range)?;
        }
        Ok(())
    }
}

/// Copies with a few threads: a mapped file's pages come in as they are touched.
fn fill(to: &mut [u8], from: &[u8]) {
    const SHARE: usize = 4 << 20;
    if from.len() <= SHARE {
        return to.copy_from_slice(from);
    }
    std::thread::scope(|scope| {
        for (to, from) in to.chunks_mut(SHARE).zip(from.chunks(SHARE)) {
            scope.spawn(|| to.copy_from_slice(from));
        }
    });
}
