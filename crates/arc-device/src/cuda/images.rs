//! The kernels that were compiled into this binary.
//!
//! `build.rs` compiles every `.cu` below `src`. A kernel is named by [`kernel!`](crate::cuda::kernel), which fails to
//! compile when no image has an entry of that name: what is launched is what is embedded, with no list kept by hand.

/// One compiled source for one architecture.
#[derive(Debug)]
pub struct Image {
    /// Path of the source below `src`, with dashes for separators.
    pub name: &'static str,
    /// Architecture, as in `90a`.
    pub arch: &'static str,
    /// Machine code.
    pub cubin: &'static [u8],
    /// Where the PTX lies on the machine that built it, for tests.
    pub ptx_path: &'static str,
    /// The assembler's report: registers, stack frames, spills.
    pub assembler: &'static str,
    /// Command lines of compiler and assembler.
    pub commands: [&'static str; 2],
}

impl Image {
    /// Compute capability that the image needs, as 10 * major + minor.
    pub fn capability(&self) -> u32 {
        self.arch.trim_end_matches(|c: char| !c.is_ascii_digit()).parse().unwrap_or(0)
    }

    /// Whether a device of this compute capability runs the image: `90a` and the like run on exactly their own.
    pub fn runs_on(&self, capability: u32) -> bool {
        let exact = !self.arch.ends_with(|c: char| c.is_ascii_digit());
        let own = self.capability();
        own == capability || (!exact && own / 10 == capability / 10 && own <= capability)
    }
}

pub use tables::{IMAGES, KERNELS};

/// What `build.rs` wrote.
mod tables {
    use super::Image;

    include!(concat!(env!("OUT_DIR"), "/images.rs"));
}

/// A kernel by its place in [`KERNELS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Kernel(pub(super) u16);

impl Kernel {
    /// The kernel's entry point.
    pub fn name(self) -> &'static str {
        KERNELS.get(usize::from(self.0)).copied().unwrap_or("(no kernels in this build)")
    }
}

/// The kernel of this name. Evaluated at compile time by [`kernel!`](crate::cuda::kernel).
pub const fn find(name: &str) -> Kernel {
    if KERNELS.is_empty() {
        // No compiler was there; `Cuda::new` refuses before anything is launched.
        return Kernel(0);
    }
    let mut i = 0;
    while i < KERNELS.len() {
        if same(KERNELS[i].as_bytes(), name.as_bytes()) {
            return Kernel(i as u16);
        }
        i += 1;
    }
    panic!("no image has a kernel of this name")
}

const fn same(a: &[u8], b: &[u8]) -> bool {
    if a.len() != b.len() {
        return false;
    }
    let mut i = 0;
    while i < a.len() {
        if a[i] != b[i] {
            return false;
        }
        i += 1;
    }
    true
}
