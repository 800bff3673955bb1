//! Counters of everything a step can cost. Each is moved by the one function that does the thing.

pub mod heap;
pub mod kv;

/// Totals since the device was made; a step's cost is a difference of two snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Stages dispatched (CPU) or kernels launched outside graphs (CUDA).
    pub launches: u64,
    /// Steps recorded: of all keys before the first request, and none after it.
    pub graphs: u64,
    /// Recorded steps that ran eagerly as well and left the same (`verify_replay`).
    pub verified: u64,
    /// Recorded steps replayed.
    pub graph_launches: u64,
    /// Kernels of the steps that were replayed.
    pub graph_kernels: u64,
    /// Buffers allocated: by the device (CPU), or of the driver (CUDA).
    pub allocs: u64,
    /// Buffers freed (CUDA).
    pub frees: u64,
    /// Blocking waits for the device (CUDA).
    pub syncs: u64,
    /// Copies to the device.
    pub h2d_copies: u64,
    /// Bytes copied to the device.
    pub h2d_bytes: u64,
    /// Copies from the device.
    pub d2h_copies: u64,
    /// Bytes copied from the device.
    pub d2h_bytes: u64,
    /// Bytes of weights that the stages had to read.
    pub weight_bytes: u64,
}

impl std::ops::Sub for Counters {
    type Output = Counters;

    fn sub(self, before: Counters) -> Counters {
        Counters {
            launches: self.launches - before.launches,
            graphs: self.graphs - before.graphs,
            verified: self.verified - before.verified,
            graph_launches: self.graph_launches - before.graph_launches,
            graph_kernels: self.graph_kernels - before.graph_kernels,
            allocs: self.allocs - before.allocs,
            frees: self.frees - before.frees,
            syncs: self.syncs - before.syncs,
            h2d_copies: self.h2d_copies - before.h2d_copies,
            h2d_bytes: self.h2d_bytes - before.h2d_bytes,
            d2h_copies: self.d2h_copies - before.d2h_copies,
            d2h_bytes: self.d2h_bytes - before.d2h_bytes,
            weight_bytes: self.weight_bytes - before.weight_bytes,
        }
    }
}
