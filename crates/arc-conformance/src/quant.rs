//! Conversions that the fused stages of DeepSeek-V4 compose: every f32.

use std::thread;

use arc_device::format::fp8::encode_e4m3;
use arc_device::{Alloc, MemoryClass, Readback};

use crate::suite::{Suite, Verdict, limits, shape};

/// f32 patterns of one launch.
const PIECE: usize = 1 << 24;

/// E4M3 of all 2^32 patterns by the processor's own conversion.
pub fn cases(suite: &mut Suite) {
    suite.case("quant/e4m3", |suite| sweep(suite, 0..=255, false));
    // 0.5 to 2: there ties away from zero differ at every other code.
    suite.mutant("quant/e4m3", |suite| sweep(suite, 0x3f..=0x3f, true));
}

/// `pieces`: upper bytes of the patterns.
fn sweep(suite: &Suite, pieces: std::ops::RangeInclusive<u32>, mutant: bool) -> Verdict {
    let text = |error: arc_device::error::DeviceError| error.to_string();
    let mut gpu = suite.gpu(limits(1, 32)).map_err(text)?;
    gpu.finish(&shape(100, 64)).map_err(text)?;
    let mut out = gpu.alloc::<u8>("codes", MemoryClass::Workspace, PIECE).map_err(text)?;
    let mut visited = gpu.alloc::<u32>("visited", MemoryClass::Workspace, 1).map_err(text)?;
    let mut codes = vec![0u8; PIECE];
    let (mut total, mut before) = (0u64, 0u32);
    for piece in pieces {
        gpu.encode_e4m3_range(&mut out, &mut visited, piece << 24, mutant).map_err(text)?;
        gpu.read(&out, &mut codes).map_err(text)?;
        let mut seen = [0];
        gpu.read(&visited, &mut seen).map_err(text)?;
        total += u64::from(seen[0].wrapping_sub(before));
        before = seen[0];
        let threads = 16;
        let wrong = thread::scope(|scope| {
            let share = PIECE / threads;
            let tasks: Vec<_> = codes
                .chunks(share)
                .enumerate()
                .map(|(i, codes)| {
                    scope.spawn(move || {
                        let first = (piece << 24) + (i * share) as u32;
                        let values: Vec<f32> = (0..share as u32).map(|i| f32::from_bits(first + i)).collect();
                        let mut want = vec![0; share];
                        encode_e4m3(&values, 1.0, &mut want);
                        want.iter().zip(codes).position(|(want, got)| want != got).map(|at| first + at as u32)
                    })
                })
                .collect();
            tasks.into_iter().filter_map(|task| task.join().expect("a comparison does not panic")).min()
        });
        if let Some(bits) = wrong {
            return Err(format!("first difference at {bits:#010x}"));
        }
    }
    match total {
        0x1_0000_0000 => Ok("4294967296 patterns".to_owned()),
        n if mutant => Ok(format!("{n} patterns")),
        n => Err(format!("{n} patterns visited")),
    }
}
