//! Memory of the CPU device: 64-byte aligned vectors, and views that tasks of a team write disjointly.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::Element;

/// A huge page. Weights start on one: streaming 100 MB through 4 kB pages misses the TLB 25,000 times.
const HUGE: usize = 2 << 20;

/// Who gave the memory.
#[derive(Clone, Copy)]
enum Source {
    /// The allocator.
    Heap,
    /// The system, as pages that cost nothing until they are touched.
    Pages {
        /// Where the mapping starts, at or before the buffer.
        base: usize,
        bytes: usize,
    },
}

/// A fixed-length zeroed vector on a cache-line border. Large ones come straight from the system as zero pages, so a
/// pool costs memory only where it is touched.
pub struct Aligned<T: Element> {
    ptr: NonNull<T>,
    len: usize,
    source: Source,
}

// SAFETY: an `Aligned` owns its memory like a `Box<[T]>`, and elements are plain values.
unsafe impl<T: Element> Send for Aligned<T> {}
// SAFETY: as above; shared access only reads.
unsafe impl<T: Element> Sync for Aligned<T> {}

impl<T: Element> Aligned<T> {
    /// `None` where the bytes are more than an address can count.
    fn layout(len: usize) -> Option<Layout> {
        let bytes = len.checked_mul(size_of::<T>())?;
        Layout::from_size_align(bytes.max(1), 64).ok()
    }

    /// `len` zeros; `None` where the system has no room for them.
    pub fn try_zeroed(len: usize) -> Option<Self> {
        let layout = Self::layout(len)?;
        if layout.size() >= HUGE
            && let Some(pages) = Self::pages(len, layout.size(), false)
        {
            return Some(pages);
        }
        // SAFETY: the layout's size is not zero. Zero bytes are a value of every `Element`, and 64 is aligned enough.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) }.cast::<T>())?;
        Some(Aligned { ptr, len, source: Source::Heap })
    }

    /// `len` zeros, where a few must be had: panics where they are not.
    pub fn zeroed(len: usize) -> Self {
        Self::try_zeroed(len).unwrap_or_else(|| panic!("no memory for {len} values of {}", T::DTYPE))
    }

    /// `len` zeros that will all be written soon and streamed often: on huge pages where the system has them.
    pub fn try_streamed(len: usize) -> Option<Self> {
        let size = Self::layout(len)?.size();
        if size < HUGE {
            return Self::try_zeroed(len);
        }
        Self::pages(len, size, true).or_else(|| Self::try_zeroed(len))
    }

    #[cfg(unix)]
    fn pages(len: usize, size: usize, huge: bool) -> Option<Self> {
        let bytes = size.checked_add(if huge { HUGE } else { 0 })?;
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new anonymous mapping, which overlaps nothing.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, prot, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return None;
        }
        let start = if huge { (base as usize).next_multiple_of(HUGE) } else { base as usize };
        #[cfg(target_os = "linux")]
        if huge {
            // SAFETY: the range is ours. The call is advice: where it fails, pages stay small.
            unsafe { libc::madvise(start as *mut libc::c_void, size, libc::MADV_HUGEPAGE) };
        }
        let ptr = NonNull::new(base.cast::<u8>().wrapping_add(start - base as usize).cast::<T>())?;
        Some(Aligned { ptr, len, source: Source::Pages { base: base as usize, bytes } })
    }

    #[cfg(not(unix))]
    fn pages(_len: usize, _size: usize, _huge: bool) -> Option<Self> {
        None
    }

    /// A view through which tasks of a team write disjoint parts.
    pub fn shared(&mut self) -> Shared<'_, T> {
        Shared { ptr: self.ptr.as_ptr(), len: self.len, _life: PhantomData }
    }
}

impl<T: Element> Drop for Aligned<T> {
    fn drop(&mut self) {
        match self.source {
            Source::Heap => {
                let layout = Self::layout(self.len).expect("it was allocated with this layout");
                // SAFETY: allocated in `try_zeroed` with the same layout.
                unsafe { dealloc(self.ptr.as_ptr().cast(), layout) }
            }
            #[cfg(unix)]
            // SAFETY: mapped in `pages` with this base and length, and unmapped once.
            Source::Pages { base, bytes } => unsafe {
                libc::munmap(base as *mut libc::c_void, bytes);
            },
            #[cfg(not(unix))]
            Source::Pages { .. } => unreachable!("pages are mapped on Unix only"),
        }
    }
}

impl<T: Element> Deref for Aligned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` initialised elements, owned by self.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl<T: Element> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl<T: Element> std::fmt::Debug for Aligned<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[{}; {}]", T::DTYPE, self.len)
    }
}

/// Bytes that the system could still give, swap included, or a container's limit where that is less. `None` where nobody tells.
pub fn free_bytes() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let group = |name: &str| read(&format!("/sys/fs/cgroup/memory.{name}"));
    let system = read("/proc/meminfo").and_then(|told| free_of_system(&told));
    let container = || free_of_container(&group("max")?, &group("current")?, &group("stat")?);
    system.into_iter().chain(container()).min()
}

/// What `/proc/meminfo` says.
fn free_of_system(told: &str) -> Option<u64> {
    let of = |name: &str| -> Option<u64> {
        told.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse().ok())
    };
    Some(of("MemAvailable:")?.saturating_add(of("SwapFree:").unwrap_or(0)).saturating_mul(1024))
}

/// What `memory.max`, `memory.current` and `memory.stat` of a control group say: cached files that nobody reads are free.
fn free_of_container(max: &str, current: &str, stat: &str) -> Option<u64> {
    let number = |text: &str| text.trim().parse::<u64>().ok();
    let cached = stat.lines().find_map(|line| number(line.strip_prefix("inactive_file ")?)).unwrap_or(0);
    Some(number(max)?.saturating_sub(number(current)?.saturating_sub(cached)))
}

/// A mutable slice that several tasks may write, each its own part.
#[derive(Clone, Copy)]
pub struct Shared<'a, T> {
    ptr: *mut T,
    len: usize,
    _life: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through unsafe functions whose callers promise disjointness.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    /// A view of a slice.
    pub fn new(slice: &'a mut [T]) -> Self {
        Shared { ptr: slice.as_mut_ptr(), len: slice.len(), _life: PhantomData }
    }

    /// The part `start .. start + len`; panics past the end.
    ///
    /// # Safety
    /// No other reference to these elements may be alive: parts taken by different tasks are disjoint, and a task
    /// drops one before it takes an overlapping one.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice_mut(&self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start <= self.len && len <= self.len - start, "{start}+{len} of {}", self.len);
        // SAFETY: in bounds as just asserted; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_memory_is_what_the_system_or_a_container_leaves() {
        let told = "MemTotal:       24 kB\nMemFree:        1 kB\nMemAvailable:   20 kB\nSwapFree:       4 kB\n";
        assert_eq!(free_of_system(told), Some(24 * 1024));
        assert_eq!(free_of_system("MemTotal: 24 kB\n"), None);
        assert_eq!(free_of_container("1000\n", "700\n", "anon 400\ninactive_file 250\nactive_file 50\n"), Some(550));
        assert_eq!(free_of_container("1000\n", "1200\n", ""), Some(0));
        assert_eq!(free_of_container("max\n", "700\n", ""), None, "no limit");
        assert!(free_bytes().is_none_or(|free| free > 0));
    }
}
