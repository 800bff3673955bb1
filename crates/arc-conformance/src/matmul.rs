//! Products, rows of a table, and the output head.

use arc_device::format::{Coding, Format};
use arc_device::ops::glu::Activation;
use arc_device::ops::matmul::{Bytes, MatrixSource};
use arc_device::step::{Limits, Row, SlotInit, StepDelta, row_flags};
use arc_device::{Alloc, Buffers, Element, MemoryClass, Norm, Ops, Readback, Steps};

use crate::compare::{all, equal_bits};
use crate::inputs::Rng;
use crate::suite::{Pair, Suite, Verdict, limits, shape, stage_key};

/// Row counts at which kernels, tiles and blocks change.
const ROWS: [usize; 10] = [1, 2, 3, 4, 7, 8, 9, 16, 64, 256];
const EPS: f32 = 1e-5;

/// Every format at every row count, alone and stacked, with everything that happens to an output.
pub fn cases(suite: &mut Suite) {
    for format in Format::ALL {
        for (n, k) in shapes(format) {
            let name = format!("matmul/{}/{n}x{k}", format.name());
            suite.case(&name, |suite| product(suite, &[(format, n)], k, &ROWS));
        }
        // Numbers of blocks by which 132 multiprocessors choose each of the kernels over many rows.
        suite.case(&format!("matmul/{}/blocks", format.name()), |suite| {
            product(suite, &[(format, 4100)], odd(format), &[64, 100, 129, 300])
        });
        // A multiprocessor has a block of 64 rows for itself: as many slices as are on their way at a time, and more.
        if matches!(format, Format::Q8_0 | Format::Q4_0 | Format::Q5_0) {
            for cols in [1024, 2304] {
                suite
                    .case(&format!("matmul/{}/blocks alone/{cols}", format.name()), |suite| alone(suite, format, cols));
            }
        }
        let long = 4 * format.block_len().max(256);
        suite.case(&format!("matmul/{}/embed", format.name()), |suite| embed(suite, &[(format, 97)], long));
    }
    let mixed = [(Format::Q4_1, 20), (Format::Q6K, 5), (Format::F16, 33), (Format::F16, 7), (Format::Q8_0, 64)];
    suite.case("matmul/stacked/embed", |suite| embed(suite, &mixed, 512));
    suite.case("matmul/stacked", |suite| product(suite, &mixed, 512, &ROWS));
    let many: Vec<(Format, usize)> = (0..21).map(|i| (Format::Q8_0, 3 + i)).collect();
    suite.case("matmul/many parts", |suite| product(suite, &many, 576, &[1, 8, 9]));
    for format in [Format::Q8_0, Format::Q4_1, Format::Q2K, Format::Iq2Xxs, Format::Mxfp4, Format::F16] {
        for act in [Activation::Silu, Activation::GeluTanh] {
            let name = format!("matmul/{}/glu {act:?}", format.name());
            suite.case(&name, |suite| glu(suite, format, 1536, 91, act));
        }
        suite.case(&format!("matmul/{}/residual", format.name()), |suite| residual(suite, format, 1024, 96, false));
        suite.case(&format!("matmul/{}/residual normed", format.name()), |suite| {
            residual(suite, format, 2048, 1100, true)
        });
        suite.case(&format!("matmul/{}/head", format.name()), |suite| head(suite, format, 768, 331, None));
        suite.case(&format!("matmul/{}/head softcap", format.name()), |suite| head(suite, format, 256, 77, Some(30.0)));
    }
    suite.mutant("matmul/slices in another order", swapped);
    suite.measure("matmul/decode", |suite| decode_rates(suite, 1));
    suite.measure("matmul/8 rows", |suite| decode_rates(suite, 8));
    suite.measure("matmul/256 rows", |suite| decode_rates(suite, 256));
}

fn shapes(format: Format) -> [(usize, usize); 5] {
    // One tile a group and several, slices by four, two and one, and where a format allows it a short one; rows that are one chunk
    // of a sum.
    [(35, 512), (40, 4096), (33, odd(format)), (1, 256), (50, 1024)]
}

/// Columns that are an odd number of slices, the last a short one where the format allows it.
fn odd(format: Format) -> usize {
    match format.block_len() {
        256 => 768,
        128 => 640,
        1 => 301,
        _ => 576,
    }
}

/// Random rows with finite scales near 1e-2.
pub fn rows_of(format: Format, rows: usize, cols: usize, rng: &mut Rng) -> Vec<u8> {
    let mut data = rng.bytes(rows * format.row_bytes(cols).expect("whole blocks"));
    let scale = |rng: &mut Rng| (0x2000 + rng.below(0x0c00) as u16).to_le_bytes();
    for block in data.chunks_exact_mut(format.block_bytes()) {
        match format {
            Format::F32 => block.copy_from_slice(&rng.unit().to_le_bytes()),
            Format::F16 | Format::Bf16 => {
                let sign = (rng.below(2) as u16) << 15;
                block.copy_from_slice(&((0x3000 + rng.below(0x0c00) as u16) | sign).to_le_bytes());
            }
            Format::Mxfp4 => block[0] = 120 + rng.below(8) as u8,
            Format::Fp8 => {
                block[0] = 112 + rng.below(8) as u8;
                // 0x7f and 0xff are NaN.
                block[1..].iter_mut().for_each(|code| *code ^= u8::from(*code & 0x7f == 0x7f));
            }
            Format::Q2K => {
                block[80..82].copy_from_slice(&scale(rng));
                block[82..84].copy_from_slice(&scale(rng));
            }
            Format::Q3K => block[108..110].copy_from_slice(&scale(rng)),
            Format::Q6K => block[208..210].copy_from_slice(&scale(rng)),
            _ => {
                block[..2].copy_from_slice(&scale(rng));
                if matches!(format, Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K) {
                    block[2..4].copy_from_slice(&scale(rng));
                }
            }
        }
    }
    data
}

/// A buffer of these values on a device.
pub fn buf<D: Alloc + Readback, T: Element>(dev: &mut D, values: &[T]) -> D::Buf<T> {
    let mut buf = dev.alloc("case", MemoryClass::Workspace, values.len()).expect("room");
    dev.write(&mut buf, values).expect("written");
    buf
}

/// What a buffer holds.
pub fn values<D: Readback>(dev: &mut D, buf: &D::Buf<f32>, n: usize) -> Vec<f32> {
    let mut out = vec![0.0; n];
    dev.read(buf, &mut out).expect("read");
    out
}

/// A matrix of these parts on both devices.
fn matrices(pair: &mut Pair, parts: &[(Format, usize)], cols: usize, rng: &mut Rng) -> Matrices {
    let bytes: Vec<Vec<u8>> = parts.iter().map(|&(format, rows)| rows_of(format, rows, cols, rng)).collect();
    let sources: Vec<MatrixSource<'_>> = parts
        .iter()
        .zip(&bytes)
        .map(|(&(format, rows), bytes)| MatrixSource { format, rows, cols, bytes: Bytes::Stored(bytes) })
        .collect();
    (pair.cpu.matrix("case", &sources).expect("room"), pair.gpu.matrix("case", &sources).expect("room"))
}

type Matrices = (<arc_device::cpu::Cpu as Buffers>::Matrix, <arc_device::cuda::Cuda as Buffers>::Matrix);

/// Rows with a block of zeros, a large value and all else near 1; a poisoned row where there are several.
fn inputs(rows: usize, cols: usize, rng: &mut Rng) -> Vec<f32> {
    let mut x = rng.values(rows * cols, 1.0);
    x[..cols.min(32)].fill(0.0);
    x[cols / 2] = 1e4;
    if rows > 5 {
        x[5 * cols + cols / 3] = f32::NAN;
    }
    x
}

/// Equal bits, any NaN equal to any: products make NaN by the processor's rules.
fn same(want: &[f32], got: &[f32]) -> Verdict {
    let plain = |x: &[f32]| -> Vec<f32> { x.iter().map(|x| if x.is_nan() { f32::NAN } else { *x }).collect() };
    equal_bits(&plain(want), &plain(got))
}

fn product(suite: &Suite, parts: &[(Format, usize)], cols: usize, counts: &[usize]) -> Verdict {
    let most = *counts.iter().max().expect("some counts");
    product_on(&mut suite.pair(limits(most, 32)), parts, cols, counts)
}

/// On 132 multiprocessors, 99 blocks.
fn alone(suite: &Suite, format: Format, cols: usize) -> Verdict {
    let mut pair = suite.pair(limits(129, 32));
    let verdict = product_on(&mut pair, &[(format, 4100)], cols, &[129])?;
    let kernel = format!("arc_matmul_mma_{}_64_alone", format.name());
    match pair.gpu.launched().any(|name| name == kernel) {
        false if pair.gpu.multiprocessors() == 132 => Err(format!("no launch of {kernel}")),
        _ => Ok(verdict),
    }
}

fn product_on(pair: &mut Pair, parts: &[(Format, usize)], cols: usize, counts: &[usize]) -> Verdict {
    let mut rng = Rng(cols as u64);
    let most = *counts.iter().max().expect("some counts");
    let n: usize = parts.iter().map(|part| part.1).sum();
    let (cpu_w, gpu_w) = matrices(pair, parts, cols, &mut rng);
    pair.finish(&shape(8, 8));
    let x = inputs(most, cols, &mut rng);
    let (weight, bias) = (rng.values(cols, 1.0), rng.values(n, 1.0));
    let Pair { cpu, gpu } = pair;
    let want = {
        let (x, weight, bias) = (buf(cpu, &x), buf(cpu, &weight), buf(cpu, &bias));
        let mut out = buf(cpu, &vec![0.0; most * n]);
        let norm = Norm { weight: &weight, eps: EPS };
        cpu.norm_matmul(&mut out, &x, norm, &cpu_w, Some(&bias), most).expect("the replica runs");
        values(cpu, &out, most * n)
    };
    let (x, weight, bias) = (buf(gpu, &x), buf(gpu, &weight), buf(gpu, &bias));
    all(counts.iter().map(|&rows| {
        let mut out = buf(gpu, &vec![f32::INFINITY; most * n]);
        let norm = Norm { weight: &weight, eps: EPS };
        gpu.norm_matmul(&mut out, &x, norm, &gpu_w, Some(&bias), rows).map_err(|error| error.to_string())?;
        let got = values(gpu, &out, most * n);
        if got[rows * n..].iter().any(|x| *x != f32::INFINITY) {
            return Err(format!("{rows} rows: wrote behind the last"));
        }
        same(&want[..rows * n], &got[..rows * n]).map_err(|why| format!("{rows} rows: {why}"))
    }))
}

fn glu(suite: &Suite, format: Format, cols: usize, n: usize, act: Activation) -> Verdict {
    let mut rng = Rng(3);
    let mut pair = suite.pair(limits(256, 32));
    let (cpu_w, gpu_w) = matrices(&mut pair, &[(format, n), (format, n)], cols, &mut rng);
    pair.finish(&shape(8, 8));
    let (x, weight) = (inputs(256, cols, &mut rng), rng.values(cols, 1.0));
    let Pair { cpu, gpu } = &mut pair;
    let want = {
        let (x, weight) = (buf(cpu, &x), buf(cpu, &weight));
        let mut out = buf(cpu, &vec![0.0; 256 * n]);
        cpu.norm_gate_up_glu(&mut out, &x, Norm { weight: &weight, eps: EPS }, &cpu_w, act, 256).expect("it runs");
        values(cpu, &out, 256 * n)
    };
    let (x, weight) = (buf(gpu, &x), buf(gpu, &weight));
    all(ROWS.iter().map(|&rows| {
        let mut out = buf(gpu, &vec![0.0; 256 * n]);
        let norm = Norm { weight: &weight, eps: EPS };
        gpu.norm_gate_up_glu(&mut out, &x, norm, &gpu_w, act, rows).map_err(|error| error.to_string())?;
        let got = values(gpu, &out, rows * n);
        same(&want[..rows * n], &got).map_err(|why| format!("{rows} rows: {why}"))
    }))
}

fn residual(suite: &Suite, format: Format, cols: usize, n: usize, normed: bool) -> Verdict {
    let mut rng = Rng(4);
    let mut pair = suite.pair(limits(64, 32));
    let (cpu_w, gpu_w) = matrices(&mut pair, &[(format, n)], cols, &mut rng);
    pair.finish(&shape(8, n));
    let (x, start, weight) = (inputs(64, cols, &mut rng), rng.values(64 * n, 1.0), rng.values(n, 1.0));
    let Pair { cpu, gpu } = &mut pair;
    let want = {
        let (x, weight, mut out) = (buf(cpu, &x), buf(cpu, &weight), buf(cpu, &start));
        let norm = normed.then_some(Norm { weight: &weight, eps: EPS });
        cpu.matmul_residual(&mut out, &x, &cpu_w, norm, 64).expect("it runs");
        values(cpu, &out, 64 * n)
    };
    let (x, weight) = (buf(gpu, &x), buf(gpu, &weight));
    all([1, 3, 8, 9, 64].map(|rows| {
        let mut out = buf(gpu, &start);
        let norm = normed.then_some(Norm { weight: &weight, eps: EPS });
        gpu.matmul_residual(&mut out, &x, &gpu_w, norm, rows).map_err(|error| error.to_string())?;
        let got = values(gpu, &out, rows * n);
        same(&want[..rows * n], &got).map_err(|why| format!("{rows} rows: {why}"))
    }))
}

/// One row a slot, each third one through the head, one row padding.
fn table(rows: usize, vocab: usize, rng: &mut Rng) -> StepDelta {
    let admit = |slot: usize| SlotInit {
        slot: slot as u16,
        generation: 1,
        max_out: 5,
        flags: 0,
        stop_ids: Vec::new(),
        sampling: Default::default(),
        blocks: vec![slot as u32],
        penalty_prompt: Vec::new(),
        pos: 0,
        logprobs: None,
        prompt_top: 0,
    };
    let row = |slot: usize, rng: &mut Rng| Row {
        slot: slot as u16,
        flags: if slot.is_multiple_of(3) { row_flags::HEAD } else { 0 },
        offset: 0,
        token: rng.below(vocab) as u32,
        target: 0,
    };
    let mut table: Vec<Row> = (0..rows).map(|slot| row(slot, rng)).collect();
    if rows > 1 {
        table[rows - 1] = Row { flags: row_flags::PADDING, ..Row::default() };
    }
    StepDelta { admit: (0..rows).map(admit).collect(), rows: Some(table), ..StepDelta::default() }
}

fn slots(rows: usize) -> Limits {
    limits(rows, 32)
}

fn embed(suite: &Suite, parts: &[(Format, usize)], cols: usize) -> Verdict {
    let mut rng = Rng(5);
    let rows = 70;
    let n = parts.iter().map(|part| part.1).sum();
    let mut pair = suite.pair(slots(rows));
    let (cpu_w, gpu_w) = matrices(&mut pair, parts, cols, &mut rng);
    pair.finish(&shape(n, cols));
    pair.stage(&table(rows, n, &mut rng));
    let Pair { cpu, gpu } = &mut pair;
    all([1.0, 27.7].map(|scale| {
        let mut want = buf(cpu, &vec![0.0; rows * cols]);
        cpu.step(stage_key(rows), &mut |dev| dev.embed(&mut want, &cpu_w, scale, rows)).map_err(|e| e.to_string())?;
        let mut got = buf(gpu, &vec![f32::INFINITY; rows * cols]);
        gpu.step(stage_key(rows), &mut |dev| dev.embed(&mut got, &gpu_w, scale, rows)).map_err(|e| e.to_string())?;
        equal_bits(&values(cpu, &want, rows * cols), &values(gpu, &got, rows * cols))
    }))
}

fn head(suite: &Suite, format: Format, cols: usize, vocab: usize, softcap: Option<f32>) -> Verdict {
    all([1usize, 5, 70].map(|rows| {
        let mut rng = Rng(6);
        let heads = if rows > 1 { (rows - 1).div_ceil(3) } else { 1 };
        let mut pair = suite.pair(slots(rows));
        let (cpu_w, gpu_w) = matrices(&mut pair, &[(format, vocab)], cols, &mut rng);
        pair.finish(&shape(vocab, cols));
        pair.stage(&table(rows, vocab, &mut rng));
        let (x, weight) = (inputs(rows, cols, &mut rng), rng.values(cols, 1.0));
        let Pair { cpu, gpu } = &mut pair;
        let want = {
            let (x, weight) = (buf(cpu, &x), buf(cpu, &weight));
            let mut out = buf(cpu, &vec![0.0; rows * vocab]);
            let norm = Norm { weight: &weight, eps: EPS };
            cpu.step(stage_key(rows), &mut |dev| dev.head(&mut out, &x, norm, &cpu_w, softcap, rows))
                .map_err(|e| e.to_string())?;
            values(cpu, &out, heads * vocab)
        };
        let (x, weight) = (buf(gpu, &x), buf(gpu, &weight));
        let mut out = buf(gpu, &vec![0.0; rows * vocab]);
        let norm = Norm { weight: &weight, eps: EPS };
        gpu.step(stage_key(rows), &mut |dev| dev.head(&mut out, &x, norm, &gpu_w, softcap, rows))
            .map_err(|e| e.to_string())?;
        same(&want, &values(gpu, &out, heads * vocab)).map_err(|why| format!("{rows} rows: {why}"))
    }))
}

/// The same numbers with slices swapped in weights and inputs: the same sum, in another order.
fn swapped(suite: &Suite) -> Verdict {
    let mut rng = Rng(8);
    let (n, cols, format) = (64, 1024, Format::Q8_0);
    assert!(format.coding() != Coding::Float);
    let mut pair = suite.pair(limits(1, 32));
    let bytes = rows_of(format, n, cols, &mut rng);
    let slice_bytes = format.row_bytes(256).expect("whole blocks");
    let moved: Vec<u8> = bytes
        .chunks_exact(4 * slice_bytes)
        .flat_map(|row| [0, 2, 1, 3].map(|s| row[s * slice_bytes..][..slice_bytes].to_vec()).concat())
        .collect();
    let source = |bytes| [MatrixSource { format, rows: n, cols, bytes: Bytes::Stored(bytes) }];
    let cpu_w = pair.cpu.matrix("case", &source(&bytes)).expect("room");
    let gpu_w = pair.gpu.matrix("case", &source(&moved)).expect("room");
    pair.finish(&shape(8, n));
    let x = rng.values(cols, 1.0);
    let moved: Vec<f32> = [0, 2, 1, 3].map(|s| x[256 * s..][..256].to_vec()).concat();
    let Pair { cpu, gpu } = &mut pair;
    let (x, mut want) = (buf(cpu, &x), buf(cpu, &vec![0.0; n]));
    cpu.matmul_residual(&mut want, &x, &cpu_w, None, 1).expect("it runs");
    let (x, mut got) = (buf(gpu, &moved), buf(gpu, &vec![0.0; n]));
    gpu.matmul_residual(&mut got, &x, &gpu_w, None, 1).map_err(|error| error.to_string())?;
    same(&values(cpu, &want, n), &values(gpu, &got, n))
}

/// Time, rate and operations of products of one size in every format, and of a layer's sizes in Q8_0.
fn decode_rates(suite: &Suite, rows: usize) -> Verdict {
    let mut text = String::new();
    let mut sizes: Vec<(Format, usize, usize)> = Format::ALL.iter().map(|&format| (format, 8192, 4096)).collect();
    for (n, k) in [(1536, 4096), (32768, 1024), (4096, 8192), (4096, 4096), (4096, 2048), (960, 576), (49152, 576)] {
        sizes.push((Format::Q8_0, n, k));
    }
    for (format, n, k) in sizes {
        // Enough copies that weights come from memory and not from the cache.
        let bytes = n * format.row_bytes(k).expect("whole blocks");
        let copies = (200_000_000 / bytes).clamp(1, 24);
        let mut gpu = suite.gpu(limits(rows, 32)).expect("`look` opened it before");
        let source = vec![0x21; bytes];
        let matrices: Vec<_> = (0..copies)
            .map(|_| {
                gpu.matrix("case", &[MatrixSource { format, rows: n, cols: k, bytes: Bytes::Stored(&source) }])
                    .expect("room")
            })
            .collect();
        gpu.finish(&shape(8, 8)).expect("room");
        let x = buf(&mut gpu, &vec![0.5f32; rows * k]);
        let mut out = buf(&mut gpu, &vec![0.0f32; rows * n]);
        let us = gpu
            .bench(stage_key(rows), 4, &mut |dev| {
                matrices.iter().try_for_each(|w| dev.matmul_residual(&mut out, &x, w, None, rows))
            })
            .map_err(|error| error.to_string())?
            / copies as f64;
        let tops = 2.0 * (rows * n * k) as f64 / us / 1e6;
        text += &format!(
            "\n      {:8} {n}x{k}: {us:.2} us, {:.0} GB/s, {tops:.1} TOPS",
            format.name(),
            bytes as f64 / us / 1e3
        );
    }
    Ok(text)
}
