use super::{LatentConfig, ROPE_DIM, RowFormat, Work, attend, inverse_rope, rope};
use crate::simd::{Isa, force_isa};

fn values(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0).collect()
}

#[test]
fn attention_agrees_with_f64_over_any_number_of_rows() {
    let mut work = Work::default();
    let mut compared = 0;
    for (heads, dim) in [(1, 128), (4, 128), (16, 512), (3, 64)] {
        for n in [1, 2, 31, 32, 33, 64, 200] {
            for strong_sink in [false, true] {
                let (q, keys) = (values(heads * dim, n), values(n * dim, n + 1));
                let sinks: Vec<f32> =
                    values(heads, 5).iter().map(|s| s + if strong_sink { 60.0 } else { 0.0 }).collect();
                let scale = 0.3;
                let mut bits: Option<Vec<f32>> = None;
                for &isa in Isa::available() {
                    let _forced = force_isa(isa);
                    let mut out = vec![f32::NAN; heads * dim];
                    attend(&mut work, &mut out, &q, &sinks, scale, n, |i, row| {
                        row.copy_from_slice(&keys[i * dim..(i + 1) * dim]);
                    });
                    for h in 0..heads {
                        let key = |i: usize, c: usize| f64::from(keys[i * dim + c]);
                        let s: Vec<f64> = (0..n)
                            .map(|i| (0..dim).map(|c| f64::from(q[h * dim + c]) * key(i, c)).sum::<f64>() * 0.3)
                            .collect();
                        let most = s.iter().fold(f64::from(sinks[h]), |a, &b| a.max(b));
                        let e: Vec<f64> = s.iter().map(|s| (s - most).exp()).collect();
                        let total = e.iter().sum::<f64>() + (f64::from(sinks[h]) - most).exp();
                        for c in 0..dim {
                            let want = (0..n).map(|i| e[i] * key(i, c)).sum::<f64>() / total;
                            let got = f64::from(out[h * dim + c]);
                            assert!((got - want).abs() < 2e-5, "{heads} {dim} {n} {h} {c}: {got} {want}");
                            compared += 1;
                        }
                    }
                    assert_eq!(*bits.get_or_insert(out.clone()), out, "{isa:?}");
                }
            }
        }
    }
    assert!(compared > 100_000);
}

#[test]
fn a_nan_key_poisons_its_query() {
    let mut work = Work::default();
    for at in [0, 40] {
        let mut out = vec![0.0; 64];
        attend(&mut work, &mut out, &[0.5; 64], &[0.0], 1.0, 41, |i, row| {
            row.fill(0.25);
            if i == at {
                row[3] = f32::NAN;
            }
        });
        assert!(out.iter().all(|x| x.is_nan()));
    }
}

#[test]
fn rope_turns_the_end_of_a_row_and_back() {
    let table: Vec<f32> = (0..ROPE_DIM / 2).flat_map(|i| [(i as f32 * 0.7).cos(), (i as f32 * 0.7).sin()]).collect();
    let x = values(128, 3);
    let mut turned = x.clone();
    rope(&mut turned, &table);
    assert_eq!(turned[..64], x[..64], "the beginning stays");
    for i in 0..32 {
        let (a, b) = (f64::from(x[64 + 2 * i]), f64::from(x[65 + 2 * i]));
        let (c, s) = (f64::from(table[2 * i]), f64::from(table[2 * i + 1]));
        assert!((f64::from(turned[64 + 2 * i]) - (a * c - b * s)).abs() < 1e-6);
        assert!((f64::from(turned[65 + 2 * i]) - (a * s + b * c)).abs() < 1e-6);
    }
    assert!(turned.iter().zip(&x).any(|(a, b)| (a - b).abs() > 0.1));
    inverse_rope(&mut turned, &table);
    assert!(turned.iter().zip(&x).all(|(a, b)| (a - b).abs() < 1e-6));
}

/// What heads read depends on distances only, once the rotation is undone; without that it depends on where they stand.
#[test]
fn undoing_the_rotation_leaves_distances_only() {
    let (dim, n) = (128, 20);
    let table = |pos: usize| -> Vec<f32> {
        (0..ROPE_DIM / 2)
            .flat_map(|i| {
                let angle = pos as f64 * 10_000f64.powf(-(2.0 * i as f64) / ROPE_DIM as f64);
                [angle.cos() as f32, angle.sin() as f32]
            })
            .collect()
    };
    let read = |start: usize, undo: bool| -> Vec<f32> {
        let (mut q, mut out) = (values(dim, 1), vec![0.0; dim]);
        rope(&mut q, &table(start + n - 1));
        attend(&mut Work::default(), &mut out, &q, &[0.1], 0.2, n, |i, row| {
            row.copy_from_slice(&values(dim, 2 + i));
            rope(row, &table(start + i));
        });
        if undo {
            inverse_rope(&mut out, &table(start + n - 1));
        }
        out
    };
    let apart = |undo: bool| {
        let (here, there) = (read(0, undo), read(1000, undo));
        here.iter().zip(&there).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    };
    assert!(apart(true) < 1e-4, "{}", apart(true));
    assert!(apart(false) > 1e-2, "the deliberately wrong variant: {}", apart(false));
}

#[test]
fn the_window_holds_its_own_token_and_those_before() {
    let cfg = LatentConfig { heads: 1, dim: 64, window: 128, groups: 1, group_out: 1, scale: 1.0, eps: 1e-6 };
    assert_eq!(cfg.ring(), 144);
    for (pos, first) in [(0, 0), (1, 0), (127, 0), (128, 1), (129, 2), (1000, 873)] {
        assert_eq!(cfg.first_visible(pos), first, "{pos}");
    }
}

#[test]
fn stored_rows_come_back_as_rounding_left_them() {
    use RowFormat::{F32, Fp4, Fp8, RoundedFp4, RoundedFp8};
    let mut changed = 0;
    for (format, dim, bytes) in
        [(F32, 512, 2048), (RoundedFp8, 512, 2048), (Fp8, 512, 584), (RoundedFp4, 128, 512), (Fp4, 128, 68)]
    {
        for seed in 0..20 {
            let x = values(dim, seed);
            assert_eq!(format.row_bytes(dim), bytes);
            let mut stored = vec![0; bytes];
            format.write(&mut stored, &x);
            let (mut back, mut rounded) = (vec![0.0; dim], x.clone());
            format.read(&stored, &mut back);
            format.round(&mut rounded);
            assert_eq!(back, rounded, "{format:?}");
            changed += usize::from(rounded != x);
            // A row that was rounded before it is stored, as the window's are.
            if matches!(format, F32 | RoundedFp8 | Fp8) {
                format.write(&mut stored, &rounded);
                format.read(&stored, &mut back);
                assert_eq!(back, rounded, "{format:?}, twice");
            }
        }
    }
    assert_eq!(changed, 80, "all but f32 round");
}
