//! Against vectors that PyTorch computed from the formulas (`tests/fixtures/deepseek-v4`), bit for bit.

use safetensors::SafeTensors;

use super::*;
use crate::ops::matmul::cpu::quantise_row;
use crate::simd::{Isa, force_isa};

const UNIT: &[u8] =
    include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/deepseek-v4/unit_vectors.safetensors"));
const INT8: &[u8] =
    include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/deepseek-v4/act_int8.safetensors"));

const PRODUCTION: KvRow = KvRow { nope: 448, rope: 64 };
const TINY: KvRow = KvRow { nope: 64, rope: 64 };

fn bytes(file: &[u8], name: &str) -> Vec<u8> {
    SafeTensors::deserialize(file).expect("a safetensors file").tensor(name).expect(name).data().to_vec()
}

fn floats(file: &[u8], name: &str) -> Vec<f32> {
    bytes(file, name).chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes"))).collect()
}

fn bf16s(file: &[u8], name: &str) -> Vec<f32> {
    bytes(file, name).chunks_exact(2).map(|b| bf16_to_f32(u16::from_le_bytes([b[0], b[1]]))).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn kv_rows_are_stored_and_read_back_as_the_reference_does() {
    let (x, want) = (floats(UNIT, "kv_fp8.in"), floats(UNIT, "kv_fp8.out"));
    let (codes, scales) = (bytes(UNIT, "kv_fp8.codes_e4m3"), bytes(UNIT, "kv_fp8.scale_ue8m0"));
    assert_eq!(x.len(), 16 * 512);
    for &isa in Isa::available() {
        let _forced = force_isa(isa);
        for (r, (x, want)) in x.chunks_exact(512).zip(want.chunks_exact(512)).enumerate() {
            let mut stored = vec![0xaa; PRODUCTION.bytes()];
            pack_kv_row(PRODUCTION, x, &mut stored);
            assert_eq!(stored[..448], codes[448 * r..448 * (r + 1)], "codes of row {r} {isa:?}");
            assert_eq!(stored[576..583], scales[7 * r..7 * (r + 1)], "scales of row {r} {isa:?}");
            assert_eq!(stored[583], 0, "padding of row {r}");
            let mut out = vec![0.0; 512];
            unpack_kv_row(PRODUCTION, &stored, &mut out);
            assert_eq!(bits(&out), bits(want), "row {r} {isa:?}");
            let mut simulated = x.to_vec();
            fp8_round_trip(&mut simulated[..448], KV_BLOCK);
            assert_eq!(bits(&simulated), bits(want), "round trip of row {r} {isa:?}");
        }
    }
}

#[test]
fn rope_values_are_rounded_to_bf16_and_small_rows_have_the_same_form() {
    assert_eq!((PRODUCTION.bytes(), TINY.bytes(), TINY.dim()), (584, 200, 128));
    let x: Vec<f32> = (0..128).map(|i| (i as f32 - 60.3) * 0.0371).collect();
    let mut stored = vec![0xff; TINY.bytes()];
    pack_kv_row(TINY, &x, &mut stored);
    assert_eq!(stored[193..], [0; 7]);
    let mut out = vec![0.0; 128];
    unpack_kv_row(TINY, &stored, &mut out);
    let mut want = x.clone();
    fp8_round_trip(&mut want[..64], KV_BLOCK);
    round_to_bf16(&mut want[64..]);
    assert_eq!(bits(&out), bits(&want));
    assert_ne!(bits(&want[64..]), bits(&x[64..]), "the values were all BF16 already");
    assert!(want.iter().zip(&x).all(|(a, b)| (a - b).abs() <= 0.07 * b.abs() + 1e-3));
}

#[test]
fn index_rows_are_transformed_and_stored_as_the_reference_does() {
    let x = floats(UNIT, "index_fp4.in");
    let (transformed, rounded) = (floats(UNIT, "index_fp4.hadamard"), floats(UNIT, "index_fp4.hadamard_bf16"));
    let want = floats(UNIT, "index_fp4.out");
    let (codes, scales) = (bytes(UNIT, "index_fp4.codes_e2m1"), bytes(UNIT, "index_fp4.scale_ue8m0"));
    assert_eq!(x.len(), 16 * 128);
    for &isa in Isa::available() {
        let _forced = force_isa(isa);
        for r in 0..16 {
            let row = 128 * r..128 * (r + 1);
            let mut h = x[row.clone()].to_vec();
            hadamard(&mut h);
            assert_eq!(bits(&h), bits(&transformed[row.clone()]), "transform of row {r} {isa:?}");
            let (mut h, mut stored) = (x[row.clone()].to_vec(), vec![0xaa; INDEX_ROW_BYTES]);
            pack_index_row(&mut h, &mut stored);
            assert_eq!(bits(&h), bits(&rounded[row.clone()]), "rounding of row {r} {isa:?}");
            assert_eq!(stored[64..], scales[4 * r..4 * (r + 1)], "scales of row {r} {isa:?}");
            for (i, code) in codes[row.clone()].iter().enumerate() {
                let byte = stored[i / 32 * 16 + i % 16];
                assert_eq!(byte >> (i % 32 / 16 * 4) & 15, *code, "code {i} of row {r} {isa:?}");
            }
            let mut out = vec![0.0; 128];
            unpack_index_row(&stored, &mut out);
            assert_eq!(bits(&out), bits(&want[row.clone()]), "row {r} {isa:?}");
            fp4_round_trip(&mut h);
            assert_eq!(bits(&h), bits(&want[row.clone()]), "round trip of row {r} {isa:?}");
            let mut simulated = x[row.clone()].to_vec();
            simulate_index_row(&mut simulated);
            let mut unrounded = transformed[row].to_vec();
            fp4_round_trip(&mut unrounded);
            assert_eq!(bits(&simulated), bits(&unrounded), "simulated row {r} {isa:?}");
        }
    }
}

/// The matrix by its definition, in f64: the passes compute this and not some other order of rows.
#[test]
fn the_transform_is_its_own_inverse_and_has_the_order_of_sylvester() {
    let x: Vec<f32> = (0..128).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.1).collect();
    let mut h = x.clone();
    hadamard(&mut h);
    for (i, h) in h.iter().enumerate() {
        let sum: f64 = x.iter().enumerate().map(|(j, x)| sign(i & j) * f64::from(*x)).sum();
        assert!((f64::from(*h) - sum / 128f64.sqrt()).abs() < 1e-5, "value {i}");
    }
    hadamard(&mut h);
    assert!(h.iter().zip(&x).all(|(h, x)| (h - x).abs() < 1e-5));
}

fn sign(bits: usize) -> f64 {
    if bits.count_ones().is_multiple_of(2) { 1.0 } else { -1.0 }
}

#[test]
fn inputs_of_fp8_linears_are_quantised_as_the_reference_does() {
    let x = bf16s(UNIT, "act_fp8.in");
    let (codes, scales) = (bytes(UNIT, "act_fp8.codes_e4m3"), bytes(UNIT, "act_fp8.scale_ue8m0"));
    assert_eq!((x.len(), codes.len(), scales.len()), (8192, 8192, 64));
    let want: Vec<f32> =
        codes.iter().enumerate().map(|(i, code)| e4m3_to_f32(*code) * e8m0_to_f32(scales[i / 128])).collect();
    let mut got = x.clone();
    fp8_round_trip(&mut got, FP8_INPUT_BLOCK);
    assert_eq!(bits(&got), bits(&want));
    // Values of random size hardly tell how long a block is, as scales are powers of two; a small half does.
    let mut halves: Vec<f32> = x[..64].iter().chain(&x[..64]).copied().collect();
    halves[..64].iter_mut().for_each(|x| *x *= 1e-6);
    let (mut together, mut apart) = (halves.clone(), halves);
    fp8_round_trip(&mut together, FP8_INPUT_BLOCK);
    fp8_round_trip(&mut apart, KV_BLOCK);
    assert!(together[..64].iter().all(|x| *x == 0.0) && apart[..64].iter().any(|x| *x != 0.0));
}

#[test]
fn every_halfway_point_of_e2m1_goes_where_the_reference_sends_it() {
    let x = floats(UNIT, "e2m1.in");
    let (codes, want) = (bytes(UNIT, "e2m1.code"), floats(UNIT, "e2m1.out"));
    assert_eq!(x.len(), 139);
    for ((x, code), want) in x.iter().zip(codes).zip(want) {
        assert_eq!(f32_to_e2m1(*x), code, "{x}");
        assert_eq!(e2m1_to_f32(code).to_bits(), want.to_bits(), "{x}");
    }
}

#[test]
fn int8_codes_and_steps_are_the_references() {
    let x = floats(INT8, "act_int8.in");
    let (codes, d) = (bytes(INT8, "act_int8.codes"), floats(INT8, "act_int8.d"));
    assert_eq!(x.len(), 8 * 256);
    for &isa in Isa::available() {
        let _forced = force_isa(isa);
        let (mut q, mut steps, mut sums) = (vec![0i8; x.len()], vec![0.0; x.len() / 32], vec![0; x.len() / 16]);
        quantise_row(&x, &mut q, &mut steps, &mut sums);
        assert!(q.iter().zip(&codes).all(|(q, code)| *q == *code as i8), "codes {isa:?}");
        assert_eq!(bits(&steps), bits(&d), "steps {isa:?}");
        let mut left = x.clone();
        int8_round_trip(&mut left);
        for (i, left) in left.iter().enumerate() {
            let want = f32::from(q[i]) * d[i / 32];
            assert!(*left == want, "value {i} {isa:?}: {left:e}, expected {want:e}");
        }
    }
}

#[test]
fn a_poisoned_block_reads_back_as_nan_and_no_other() {
    for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x: Vec<f32> = (0..512).map(|i| i as f32 * 0.01 - 2.0).collect();
        x[70] = poison;
        x[500] = poison;
        let (mut stored, mut out) = (vec![0; PRODUCTION.bytes()], vec![0.0; 512]);
        pack_kv_row(PRODUCTION, &x, &mut stored);
        unpack_kv_row(PRODUCTION, &stored, &mut out);
        for (i, out) in out.iter().enumerate() {
            assert_eq!(out.is_finite(), i / 64 != 1 && i != 500, "{poison}: value {i} is {out}");
        }
        assert!(out[64..128].iter().all(|out| out.is_nan()));

        let (mut row, mut stored, mut out) = (x[..128].to_vec(), vec![0; INDEX_ROW_BYTES], vec![0.0; 128]);
        pack_fp4_row(&row, &mut stored);
        unpack_index_row(&stored, &mut out);
        int8_round_trip(&mut row);
        for i in 0..128 {
            assert_eq!(out[i].is_nan(), i / 32 == 2, "{poison}: index value {i}");
            assert_eq!(row[i].is_nan(), i / 32 == 2, "{poison}: int8 value {i}");
        }
    }
}

#[test]
fn zeros_and_the_largest_numbers_survive() {
    for value in [0.0, -0.0, 1e-30, 1e38, -1e38] {
        let mut x = [value; 128];
        fp8_round_trip(&mut x, FP8_INPUT_BLOCK);
        let mut y = [value; 128];
        fp4_round_trip(&mut y);
        let tiny = value.abs() < 1.0;
        assert!(x.iter().chain(&y).all(|v| v.is_finite()), "{value:e}: {} {}", x[0], y[0]);
        assert!(tiny || (x[0] / value - 1.0).abs() < 0.07 && (y[0] / value - 1.0).abs() < 0.26, "{value:e}");
        assert!(x[0].is_sign_negative() == value.is_sign_negative());
    }
}
