//! What memory gives: the ceiling that decoding is measured against.

use std::{hint::black_box, time::Instant};

/// Bytes read for one measurement: several times the largest caches.
const BYTES: usize = 512 << 20;

/// Bytes a second that `threads` threads read from memory together: the best of five passes over half a GiB.
pub fn read_bytes_per_s(threads: usize) -> f64 {
    let words = vec![1_u64; BYTES / 8];
    let share = words.len().div_ceil(threads.max(1));
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        let sum: u64 = std::thread::scope(|scope| {
            let threads: Vec<_> = words.chunks(share).map(|part| scope.spawn(move || sum(part))).collect();
            threads.into_iter().map(|t| t.join().expect("a sum cannot panic")).sum()
        });
        assert_eq!(black_box(sum), words.len() as u64);
        best = best.min(start.elapsed().as_secs_f64());
    }
    BYTES as f64 / best
}

/// Thirty-two sums at a time, so that no addition waits for the one before it.
fn sum(words: &[u64]) -> u64 {
    let mut sums = [0_u64; 32];
    let chunks = words.chunks_exact(32);
    let rest: u64 = chunks.remainder().iter().sum();
    for chunk in chunks {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().sum::<u64>() + rest
}

/// The processor by the name that the system gives it.
pub fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}
