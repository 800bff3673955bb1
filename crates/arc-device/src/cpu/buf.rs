//! Memory of the CPU device: 64-byte aligned vectors, and views that tasks of a team write disjointly.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::Element;

/// A fixed-length zeroed vector on a cache-line border. Large ones come straight from the system as zero pages, so a
/// pool costs memory only where it is touched.
pub struct Aligned<T: Element> {
    ptr: NonNull<T>,
    len: usize,
}

// SAFETY: an `Aligned` owns its memory like a `Box<[T]>`, and elements are plain values.
unsafe impl<T: Element> Send for Aligned<T> {}
// SAFETY: as above; shared access only reads.
unsafe impl<T: Element> Sync for Aligned<T> {}

impl<T: Element> Aligned<T> {
    fn layout(len: usize) -> Layout {
        let bytes = len.checked_mul(size_of::<T>()).expect("buffer size fits an address");
        Layout::from_size_align(bytes.max(1), 64).expect("buffer size fits an address")
    }

    /// `len` zeros.
    pub fn zeroed(len: usize) -> Self {
        let layout = Self::layout(len);
        // SAFETY: the layout's size is not zero. All `Element`s are numbers, for which zero bytes are valid.
        let ptr = unsafe { alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(ptr.cast::<T>()) else { handle_alloc_error(layout) };
        Aligned { ptr, len }
    }

    /// A view through which tasks of a team write disjoint parts.
    pub fn shared(&mut self) -> Shared<'_, T> {
        Shared { ptr: self.ptr.as_ptr(), len: self.len, _life: PhantomData }
    }
}

impl<T: Element> Drop for Aligned<T> {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with the same layout.
        unsafe { dealloc(self.ptr.as_ptr().cast(), Self::layout(self.len)) }
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
