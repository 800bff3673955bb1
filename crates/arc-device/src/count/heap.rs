//! The host's heap, counted: a global allocator for tests that a step allocates nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

static ALL: AtomicU64 = AtomicU64::new(0);

thread_local! {
    // Const and without a destructor: reading it can itself never allocate.
    static ALLOCS: Cell<u64> = const { Cell::new(0) };
}

/// The system allocator, counting allocations and growths, by thread and in all. A test makes it its `#[global_allocator]`.
#[derive(Debug)]
pub struct CountingAlloc;

/// Allocations that this thread made; always 0 where [`CountingAlloc`] is not the global allocator.
pub fn allocs_on_this_thread() -> u64 {
    ALLOCS.get()
}

/// Allocations of all threads; always 0 where [`CountingAlloc`] is not the global allocator.
pub fn allocs_of_all_threads() -> u64 {
    ALL.load(Ordering::Relaxed)
}

fn count() {
    ALL.fetch_add(1, Ordering::Relaxed);
    // A thread that is ending has no counter any more, and no step to answer for.
    let _ = ALLOCS.try_with(|n| n.set(n.get() + 1));
}

// SAFETY: every call goes to the system allocator with the caller's own arguments; counting touches no memory of it.
unsafe impl GlobalAlloc for CountingAlloc {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps `GlobalAlloc::alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps `GlobalAlloc::alloc_zeroed`'s contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller keeps `GlobalAlloc::realloc`'s contract; `ptr` came from `System` through this allocator.
        unsafe { System.realloc(ptr, layout, new_size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps `GlobalAlloc::dealloc`'s contract; `ptr` came from `System` through this allocator.
        unsafe { System.dealloc(ptr, layout) }
    }
}
