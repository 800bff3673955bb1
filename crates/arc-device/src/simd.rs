//! One home for "which vector instructions may this process use".
//!
//! A hot loop is written once, in plain Rust, and compiled three times by `multiversion!`: for the target's baseline,
//! for AVX2 + FMA, and for AVX-512 with VNNI. [`isa`] picks at run time. The three give the same bits, because Rust
//! neither contracts `a * b + c` nor reassociates float sums: where a fused multiply-add is wanted the code says
//! `f32::mul_add`, and where lanes are summed it says in which order.

use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering;

/// A set of vector instructions that kernels are compiled for, from the least to the most capable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Isa {
    /// What the compilation target guarantees (SSE2 on x86-64, NEON on aarch64). Always available.
    Scalar = 1,
    /// AVX2, FMA, F16C, BMI1/2, LZCNT and POPCNT.
    Avx2 = 2,
    /// All of [`Isa::Avx2`] and AVX-512 F, BW, CD, DQ, VL, VNNI.
    Avx512 = 3,
}

impl Isa {
    /// The sets that this machine has, in ascending order; the first is always [`Isa::Scalar`].
    ///
    /// Tests that compare paths loop over it.
    pub fn available() -> &'static [Isa] {
        const ALL: [Isa; 3] = [Isa::Scalar, Isa::Avx2, Isa::Avx512];
        &ALL[..detect() as usize]
    }
}

/// 0 means "not asked yet"; otherwise the discriminant of the set in use.
static IN_USE: AtomicU8 = AtomicU8::new(0);

/// Held while a test forces a set, so that two such tests do not undo each other.
static FORCING: Mutex<()> = Mutex::new(());

/// The set that dispatching functions use: the most capable one of this machine, unless a test forced another.
#[inline]
pub fn isa() -> Isa {
    match IN_USE.load(Ordering::Relaxed) {
        3 => Isa::Avx512,
        2 => Isa::Avx2,
        1 => Isa::Scalar,
        _ => {
            let found = detect();
            IN_USE.store(found as u8, Ordering::Relaxed);
            found
        }
    }
}

/// Makes every thread of the process use `isa` until the guard is dropped. For tests and benchmarks.
///
/// A second caller waits for the first guard. Panics if this machine lacks the set: it would be unsound to go on.
pub fn force_isa(isa: Isa) -> ForcedIsa {
    assert!(isa <= detect(), "this machine has no {isa:?}, only {:?}", Isa::available());
    // A panicking test poisons the lock; the unit inside cannot be left half-written.
    let turn = FORCING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    IN_USE.store(isa as u8, Ordering::Relaxed);
    ForcedIsa { _turn: turn }
}

/// Guard of [`force_isa`].
pub struct ForcedIsa {
    _turn: MutexGuard<'static, ()>,
}

impl Drop for ForcedIsa {
    fn drop(&mut self) {
        IN_USE.store(detect() as u8, Ordering::Relaxed);
    }
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Isa {
    // Must name every feature that `multiversion!` enables. The standard library caches the answers.
    let avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
        && is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("bmi2")
        && is_x86_feature_detected!("lzcnt")
        && is_x86_feature_detected!("popcnt");
    let avx512 = avx2
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512cd")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni");
    match (avx2, avx512) {
        (_, true) => Isa::Avx512,
        (true, false) => Isa::Avx2,
        (false, false) => Isa::Scalar,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Isa {
    Isa::Scalar
}

/// Asks for the cache lines of `len` bytes from `start` on. Nothing is touched: any address will do.
#[inline(always)]
pub(crate) fn prefetch_lines(isa: Isa, start: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if isa != Isa::Scalar {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        for line in (0..len).step_by(64) {
            // SAFETY: a prefetch cannot fault.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(line).cast()) };
        }
    }
    let _ = (isa, start, len);
}

/// Compiles a function body for every [`Isa`] and dispatches on [`isa`] at each call.
///
/// The body must be plain Rust; the functions it calls must be `#[inline(always)]`, or they are compiled for the
/// baseline only. Arguments are plain names; generics are not supported.
///
/// ```text
/// multiversion! {
///     /// Adds `x` to `out`.
///     pub fn add(out: &mut [f32], x: &[f32]) {
///         for (o, x) in out.iter_mut().zip(x) {
///             *o += x;
///         }
///     }
/// }
/// ```
macro_rules! multiversion {
    ($(
        $(#[$meta:meta])*
        $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block
    )+) => {$(
        $(#[$meta])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
                #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vnni")]
                #[allow(clippy::too_many_arguments)]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }

                #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
                #[allow(clippy::too_many_arguments)]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }

                match $crate::simd::isa() {
                    // SAFETY: `isa` names a set only after the CPU reported every feature enabled above (`detect`).
                    $crate::simd::Isa::Avx512 => unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::simd::Isa::Avx2 => unsafe { avx2($($arg),*) },
                    $crate::simd::Isa::Scalar => body($($arg),*),
                }
            }

            #[cfg(not(target_arch = "x86_64"))]
            body($($arg),*)
        }
    )+};
}

/// Makes `$name` dispatch to `$body(isa, args..)`, compiled for every [`Isa`], the set being its first argument.
///
/// For bodies that call intrinsics: `$body` is an `#[inline(always)] unsafe fn` whose promise is that the machine has
/// `isa` and that its caller is compiled for it.
macro_rules! with_isa {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) => $body:path) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name($($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
                #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vnni")]
                #[allow(clippy::too_many_arguments)]
                fn avx512($($arg: $ty),*) {
                    // SAFETY: called only where `isa` found the set, and compiled for it.
                    unsafe { $body($crate::simd::Isa::Avx512, $($arg),*) }
                }

                #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt")]
                #[allow(clippy::too_many_arguments)]
                fn avx2($($arg: $ty),*) {
                    // SAFETY: as above.
                    unsafe { $body($crate::simd::Isa::Avx2, $($arg),*) }
                }

                match $crate::simd::isa() {
                    // SAFETY: `isa` names a set only after the CPU reported every feature enabled above.
                    $crate::simd::Isa::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::simd::Isa::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::simd::Isa::Scalar => {}
                }
            }
            // SAFETY: every machine has the scalar set.
            unsafe { $body($crate::simd::Isa::Scalar, $($arg),*) }
        }
    };
}

pub(crate) use multiversion;
pub(crate) use with_isa;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forcing_is_undone_when_the_guard_goes() {
        assert_eq!(Isa::available()[0], Isa::Scalar);
        for &set in Isa::available() {
            let _forced = force_isa(set);
            assert_eq!(isa(), set);
        }
        let best = *Isa::available().last().expect("Scalar is always there");
        let _turn = force_isa(best);
        assert_eq!(isa(), best);
    }
}
