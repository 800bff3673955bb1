use super::cpu::{Activations, decode_row, matmul, quantise_row, store};
use super::pack::PackedMatrix;
use super::{Bytes, MatrixSource};
use crate::cpu::buf::{Aligned, Shared};
use crate::cpu::team::Team;
use crate::format::{Coding, Format, Scales};
use crate::simd::{Isa, force_isa};

fn pack(team: &mut Team, sources: &[MatrixSource<'_>]) -> PackedMatrix {
    PackedMatrix::pack(team, sources).expect("little memory")
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32 * 2.0 - 1.0
    }
}

/// Random rows whose f16 scales are finite and near 1e-2.
fn random_rows(format: Format, rows: usize, cols: usize, random: &mut Random) -> Vec<u8> {
    let bytes = rows * format.row_bytes(cols).expect("whole blocks");
    let mut data: Vec<u8> = (0..bytes).map(|_| random.next() as u8).collect();
    let scale = |random: &mut Random| (0x2000 + (random.next() % 0x0c00) as u16).to_le_bytes();
    for block in data.chunks_exact_mut(format.block_bytes()) {
        match format {
            Format::F32 => block.copy_from_slice(&random.unit().to_le_bytes()),
            Format::F16 | Format::Bf16 => {
                let sign = (random.next() as u16 & 1) << 15;
                block.copy_from_slice(&((0x3000 + (random.next() % 0x0c00) as u16) | sign).to_le_bytes());
            }
            Format::Mxfp4 => block[0] = 120 + (random.next() % 8) as u8,
            Format::Fp8 => {
                block[0] = 112 + (random.next() % 8) as u8;
                // 0x7f and 0xff are NaN.
                block[1..].iter_mut().for_each(|code| *code ^= u8::from(*code & 0x7f == 0x7f));
            }
            Format::Q2K => {
                block[80..82].copy_from_slice(&scale(random));
                block[82..84].copy_from_slice(&scale(random));
            }
            Format::Q3K => block[108..110].copy_from_slice(&scale(random)),
            Format::Q6K => block[208..210].copy_from_slice(&scale(random)),
            _ => {
                block[..2].copy_from_slice(&scale(random));
                if matches!(format, Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K) {
                    block[2..4].copy_from_slice(&scale(random));
                }
            }
        }
    }
    data
}

/// The contract, read off its text: one output of one row.
fn by_the_text(format: Format, row: &[u8], x: &[f32]) -> f32 {
    let cols = x.len();
    let mut total = 0.0f32;
    if format.coding() == Coding::Float {
        let mut w = vec![0.0; cols];
        format.decode_row(row, &mut w);
        for (w, x) in w.chunks(256).zip(x.chunks(256)) {
            total += w.iter().zip(x).fold(0.0f32, |acc, (w, x)| w.mul_add(*x, acc));
        }
        return total;
    }
    let codes = format.codes().expect("integer-coded");
    for slice in 0..cols.div_ceil(256) {
        let mut acc = 0.0f32;
        for b in slice * 8..(slice * 8 + 8).min(cols / 32) {
            let x = &x[32 * b..32 * b + 32];
            let amax = x.iter().fold(0.0f32, |a, x| a.max(x.abs()));
            let q: Vec<i32> =
                x.iter().map(|x| if amax == 0.0 { 0 } else { ((x / amax) * 127.0).round_ties_even() as i32 }).collect();
            let d_x = amax / 127.0;
            let block = format.unpack32(row, b);
            let half = |h: usize| -> (i32, i32) {
                let values = (16 * h..16 * h + 16).map(|k| (i32::from(block.codes[k]) - i32::from(codes.offset), q[k]));
                values.fold((0, 0), |(dot, sum), (w, q)| (dot + w * q, sum + q))
            };
            let ((dot0, sum0), (dot1, sum1)) = (half(0), half(1));
            let (d, dot, m, min) = match block.scales {
                Scales::PerBlock { d, m } => (d, dot0 + dot1, m, sum0 + sum1),
                Scales::PerHalf { d, sc, m, min } => (d, sc[0] * dot0 + sc[1] * dot1, m, min[0] * sum0 + min[1] * sum1),
            };
            acc = (d * d_x).mul_add(dot as f32, acc);
            if codes.has_min {
                acc = (m * d_x).mul_add(min as f32, acc);
            }
        }
        total += acc;
    }
    total
}

fn run(team: &mut Team, w: &PackedMatrix, x: &[f32], rows: usize) -> Vec<f32> {
    let mut acts = Activations::new(rows, w.cols).expect("little memory");
    acts.fill(team, w, rows, &|r, out| out.copy_from_slice(&x[r * w.cols..(r + 1) * w.cols]));
    let mut out = vec![f32::NAN; rows * w.rows];
    let view = Shared::new(&mut out);
    matmul(team, w, &acts, rows, &|first, lanes, row, block| {
        // SAFETY: every tile is its own columns.
        unsafe { store(view, w.rows, first, lanes, row, block, |_, out, value| *out = value) }
    });
    out
}

#[test]
fn every_format_set_and_thread_count_gives_the_bits_of_the_text() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut compared = 0;
    for format in Format::ALL {
        // Partial tiles, one slice and several, and a last slice that is short.
        let long = match format.block_len() {
            256 => 768,
            128 => 640,
            _ => 576,
        };
        for (n_out, cols) in [(1, 256), (35, 512), (48, long)] {
            let bytes = random_rows(format, n_out, cols, &mut random);
            let rows = 21;
            let mut x: Vec<f32> = (0..rows * cols).map(|_| random.unit() * 4.0).collect();
            x[..32].fill(0.0);
            x[40] = 1e4;
            let row_bytes = bytes.len() / n_out;
            let want: Vec<u32> = (0..rows)
                .flat_map(|r| (0..n_out).map(move |n| (r, n)))
                .map(|(r, n)| {
                    by_the_text(format, &bytes[n * row_bytes..(n + 1) * row_bytes], &x[r * cols..(r + 1) * cols])
                        .to_bits()
                })
                .collect();
            for &isa in Isa::available() {
                let _forced = force_isa(isa);
                for threads in [1, 3] {
                    let mut team = Team::new(threads);
                    let w =
                        pack(&mut team, &[MatrixSource { format, rows: n_out, cols, bytes: Bytes::Stored(&bytes) }]);
                    for n in [1, 2, 3, 8, 13, rows] {
                        let got = run(&mut team, &w, &x[..n * cols], n);
                        let got: Vec<u32> = got.iter().map(|v| v.to_bits()).collect();
                        assert_eq!(
                            got,
                            want[..n * n_out],
                            "{} {n_out}x{cols} {isa:?} {threads} threads {n} rows",
                            format.name()
                        );
                        compared += got.len();
                    }
                }
            }
        }
    }
    assert!(compared > 100_000, "{compared}");
}

#[test]
fn parts_of_several_formats_stand_one_after_the_other() {
    let mut random = Random(7);
    let cols = 256;
    let formats = [(Format::Q4_1, 20), (Format::Q6K, 5), (Format::F16, 33)];
    let bytes: Vec<Vec<u8>> = formats.iter().map(|&(f, n)| random_rows(f, n, cols, &mut random)).collect();
    let sources: Vec<MatrixSource<'_>> = formats
        .iter()
        .zip(&bytes)
        .map(|(&(format, rows), bytes)| MatrixSource { format, rows, cols, bytes: Bytes::Stored(bytes) })
        .collect();
    let mut team = Team::new(2);
    let w = pack(&mut team, &sources);
    assert_eq!(w.rows, 58);
    let x: Vec<f32> = (0..cols).map(|_| random.unit()).collect();
    let got = run(&mut team, &w, &x, 1);
    let mut n = 0;
    for source in sources {
        let bytes = source.stored();
        let row_bytes = bytes.len() / source.rows;
        let mut decoded = vec![0.0; cols];
        let mut packed = vec![0.0; cols];
        for row in bytes.chunks_exact(row_bytes) {
            assert_eq!(got[n].to_bits(), by_the_text(source.format, row, &x).to_bits(), "row {n}");
            source.format.decode_row(row, &mut decoded);
            decode_row(&w, n, &mut packed);
            assert_eq!(packed, decoded, "row {n}");
            n += 1;
        }
    }
    assert_eq!(n, 58);
}

#[test]
fn every_format_survives_packing() {
    let mut random = Random(11);
    let cols = 512;
    for format in Format::ALL {
        let bytes = random_rows(format, 19, cols, &mut random);
        let mut team = Team::new(2);
        let w = pack(&mut team, &[MatrixSource { format, rows: 19, cols, bytes: Bytes::Stored(&bytes) }]);
        assert_eq!(w.bytes(), bytes.len() / 19 * 32, "{}: packing adds padding rows and nothing else", format.name());
        for (n, row) in bytes.chunks_exact(bytes.len() / 19).enumerate() {
            let (mut want, mut got) = (vec![0.0; cols], vec![1.0; cols]);
            format.decode_row(row, &mut want);
            decode_row(&w, n, &mut got);
            assert_eq!(got, want, "{} row {n}", format.name());
        }
    }
}

/// The largest integers that any code and any activation can make, where an i16 or a signed byte would break.
#[test]
fn extreme_codes_and_activations_do_not_saturate() {
    let cols = 256;
    for format in Format::ALL.into_iter().filter(|format| format.codes().is_some()) {
        for fill in [0x00, 0x7f, 0x80, 0xff] {
            let mut bytes = vec![fill; format.row_bytes(cols).expect("whole blocks")];
            let mut random = Random(3);
            let scaled = random_rows(format, 1, cols, &mut random);
            // Keep the scales finite: take them from a sane row.
            for (block, sane) in
                bytes.chunks_exact_mut(format.block_bytes()).zip(scaled.chunks_exact(format.block_bytes()))
            {
                match format {
                    Format::Mxfp4 => block[0] = sane[0],
                    Format::Q2K => block[80..84].copy_from_slice(&sane[80..84]),
                    Format::Q3K => block[108..110].copy_from_slice(&sane[108..110]),
                    Format::Q6K => block[208..210].copy_from_slice(&sane[208..210]),
                    _ => block[..4].copy_from_slice(&sane[..4]),
                }
            }
            for sign in [-1.0f32, 1.0] {
                let x = vec![sign * 3.0; cols];
                let want = by_the_text(format, &bytes, &x);
                for &isa in Isa::available() {
                    let _forced = force_isa(isa);
                    let mut team = Team::new(1);
                    let w = pack(&mut team, &[MatrixSource { format, rows: 1, cols, bytes: Bytes::Stored(&bytes) }]);
                    let got = run(&mut team, &w, &x, 1)[0];
                    assert_eq!(got.to_bits(), want.to_bits(), "{} fill {fill:#x} sign {sign} {isa:?}", format.name());
                }
            }
        }
    }
}

#[test]
fn a_poisoned_block_makes_its_row_nan_and_no_other() {
    let mut random = Random(5);
    for format in [Format::Q8_0, Format::Q4_1, Format::F16, Format::Fp8] {
        let cols = 256;
        let bytes = random_rows(format, 16, cols, &mut random);
        let mut team = Team::new(2);
        let w = pack(&mut team, &[MatrixSource { format, rows: 16, cols, bytes: Bytes::Stored(&bytes) }]);
        for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x: Vec<f32> = (0..3 * cols).map(|_| random.unit()).collect();
            let clean = run(&mut team, &w, &x, 3);
            x[cols + 77] = poison;
            let got = run(&mut team, &w, &x, 3);
            assert!(got[16..32].iter().all(|v| !v.is_finite()), "{} {poison}", format.name());
            assert_eq!(got[..16], clean[..16]);
            assert_eq!(got[32..], clean[32..]);
        }
    }
}

/// The order `(x / amax) * 127` matters: the other one breaks the tie at x = amax / 2 differently.
#[test]
fn quantisation_follows_the_stated_order() {
    let mut differs = 0;
    let mut random = Random(17);
    for _ in 0..20_000 {
        let mut x = [0.0f32; 32];
        x[0] = random.unit().abs() + 0.1;
        for (i, x_i) in (1..32).zip([0.5, -0.5, 0.25, 0.75].into_iter().cycle()) {
            x[i] = x[0] * x_i;
        }
        let (mut q, mut d, mut sums) = ([0i8; 32], [0.0], [0; 2]);
        quantise_row(&x, &mut q, &mut d, &mut sums);
        assert_eq!(d[0], x[0] / 127.0);
        for (x_i, q) in x.iter().zip(q) {
            assert_eq!(q, ((x_i / x[0]) * 127.0).round_ties_even() as i8);
            differs += usize::from(q != (x_i * (127.0 / x[0])).round_ties_even() as i8);
        }
        let halves = [&q[..16], &q[16..]].map(|half| half.iter().map(|&q| i32::from(q)).sum::<i32>());
        assert_eq!(sums, halves);
    }
    assert!(differs > 0, "the wrong order was never told apart");
}

#[test]
fn aligned_buffers_are_zero_and_aligned() {
    let buf = Aligned::<f32>::zeroed(1001);
    assert_eq!(buf.as_ptr() as usize % 64, 0);
    assert!(buf.iter().all(|&v| v == 0.0) && buf.len() == 1001);
}
