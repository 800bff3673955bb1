//! What can go wrong on a device, and how each kind travels.

/// A failure of the set-up or of a driver call. Row faults are not errors: they travel in a row's [`Landed`] entry.
///
/// [`Landed`]: crate::step::Landed
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// A buffer did not fit. Raised at load only; a step never allocates.
    #[error(
        "out of device memory for {name}: {bytes} bytes needed, {free} free; lower --context, --slots or --max-rows"
    )]
    OutOfMemory {
        /// What was being allocated.
        name: String,
        /// Bytes asked for.
        bytes: u64,
        /// Bytes left on the device.
        free: u64,
    },
    /// A weight's bytes do not match its shape and format.
    #[error("matrix {name}: {rows}x{cols} in {format} takes {want} bytes, the source has {have}")]
    MatrixSize {
        /// Tensor name.
        name: String,
        /// Output rows.
        rows: usize,
        /// Input columns.
        cols: usize,
        /// Format name.
        format: &'static str,
        /// Bytes that the shape takes.
        want: u64,
        /// Bytes that the source has.
        have: u64,
    },
    /// This device has no kernel for a combination that a model asked for.
    #[error("{device} device: {what} is not supported")]
    Unsupported {
        /// Device name.
        device: &'static str,
        /// What was asked for.
        what: String,
    },
    /// There is no such device on this machine, or this build cannot use it.
    #[error("no {device} device: {why}")]
    Unavailable {
        /// Device name.
        device: &'static str,
        /// What is missing, and what to do.
        why: String,
    },
    /// A call of the CUDA driver failed. Whatever was in flight is lost.
    #[error("{call} failed at {stage}: {message} (code {code})")]
    Cuda {
        /// The driver's function.
        call: &'static str,
        /// The kernel or the phase.
        stage: &'static str,
        /// The driver's code.
        code: i32,
        /// What the driver says of it.
        message: String,
    },
    /// A step key that was not prepared at warm-up.
    #[error("step {key} was not recorded at warm-up")]
    UnknownStep {
        /// The key, printed.
        key: String,
    },
    /// A recorded step and the same step run eagerly left different things.
    #[error("step {key} leaves `{replayed}` replayed, and `{eager}` run eagerly")]
    Replay {
        /// The key, printed.
        key: String,
        /// What the eager step left, where they part.
        eager: String,
        /// What the replayed one did.
        replayed: String,
    },
    /// The ring's reader is too far behind for another step.
    #[error("the token ring is full: step {step} would overwrite step {oldest}, which was not read")]
    RingFull {
        /// The step that was to be enqueued.
        step: u64,
        /// The oldest step not yet read.
        oldest: u64,
    },
    /// The device failed; see [`Fault`]. Sticky.
    #[error("device fault: {0}")]
    Fault(Fault),
}

/// A latched failure of the whole device: nothing pretends to continue after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The stream reported an error; the driver's code.
    Stream(i32),
    /// The stream is idle, but fewer steps landed than were enqueued.
    LostStep {
        /// Steps enqueued.
        enqueued: u64,
        /// Steps landed.
        landed: u64,
    },
    /// A step did not land within the poll limit.
    Stuck {
        /// The step that was waited for.
        step: u64,
    },
    /// A kernel found its own index out of range and wrote the fault word.
    Word(u32),
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Fault::Stream(code) => write!(f, "stream error {code}"),
            Fault::LostStep { enqueued, landed } => {
                write!(f, "stream idle with {landed} of {enqueued} steps landed")
            }
            Fault::Stuck { step } => write!(f, "step {step} did not land in time"),
            Fault::Word(word) => write!(f, "a kernel reported fault word {word:#x}"),
        }
    }
}

/// Result of a device call.
pub type Result<T> = std::result::Result<T, DeviceError>;
