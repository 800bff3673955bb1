use super::*;

/// Blocks and their values, as decoded by the `gguf` Python package (`tests/reference/formats.py`).
const GOLDEN: &[u8] = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/formats.bin"));

struct Golden {
    format: Format,
    bytes: Vec<u8>,
    values: Vec<f32>,
}

fn in_gguf() -> Vec<Format> {
    Format::ALL.into_iter().filter(|format| format.ggml_type().is_some()).collect()
}

fn golden() -> Vec<Golden> {
    let mut rest = GOLDEN;
    let mut take = |n: usize| rest.split_off(..n).expect("the golden file is whole");
    let mut all = Vec::new();
    for _ in 0..in_gguf().len() {
        let len = take(1)[0];
        let name = str::from_utf8(take(len.into())).expect("a name");
        let format = Format::from_name(name).expect("a known name");
        let mut number = || u32::from_le_bytes(take(4).try_into().expect("4 bytes")) as usize;
        let (n, block_bytes, block_len) = (number(), number(), number());
        assert_eq!((format.block_bytes(), format.block_len()), (block_bytes, block_len), "{name}");
        let bytes = take(n * block_bytes).to_vec();
        let values =
            take(n * block_len * 4).chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes")));
        all.push(Golden { format, bytes, values: values.collect() });
    }
    assert!(take(0).is_empty() && rest.is_empty(), "bytes after the last format");
    all
}

fn assert_bits(format: Format, ours: &[f32], theirs: &[f32]) {
    for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
        assert_eq!(a.to_bits(), b.to_bits(), "{} value {i}: {a:e}, expected {b:e}", format.name());
    }
    assert_eq!(ours.len(), theirs.len());
}

#[test]
fn decoding_equals_the_gguf_package_bit_for_bit() {
    let golden = golden();
    assert_eq!(golden.iter().map(|g| g.format).collect::<Vec<_>>(), in_gguf());
    assert_eq!(golden.len(), 15);
    for Golden { format, bytes, values } in golden {
        let mut out = vec![0.0; values.len()];
        format.decode_row(&bytes, &mut out);
        assert_bits(format, &out, &values);
        let (block_bytes, block_len) = (format.block_bytes(), format.block_len());
        let last = values.len() / block_len - 1;
        format.decode_block(&bytes[last * block_bytes..], &mut out[..block_len]);
        assert_bits(format, &out[..block_len], &values[last * block_len..]);
    }
}

/// The formulas at the head of the module, in f64, where every product and sum of these numbers is exact or rounded far
/// below an f32's last place: the view stands for the same values without trusting `decode_row`.
#[test]
fn the_integer_view_stands_for_the_same_values() {
    let mut seen = 0;
    for Golden { format, bytes, values } in golden() {
        let Some(codes) = format.codes() else { continue };
        seen += 1;
        let mut largest = 0;
        for (block_idx, expected) in values.chunks_exact(32).enumerate() {
            let block = format.unpack32(&bytes, block_idx);
            for (i, expected) in expected.iter().enumerate() {
                largest = largest.max(block.codes[i]);
                let q = f64::from(block.codes[i]) - f64::from(codes.offset);
                let value = match block.scales {
                    Scales::PerBlock { d, m } => f64::from(d) * q + f64::from(m),
                    Scales::PerHalf { d, sc, m, min } => {
                        f64::from(d) * f64::from(sc[i / 16]) * q + f64::from(m) * f64::from(min[i / 16])
                    }
                };
                assert!(value as f32 == *expected, "{} value {i} of block {block_idx}", format.name());
            }
            let kind = matches!(block.scales, Scales::PerHalf { .. });
            assert_eq!(kind, matches!(format.coding(), Coding::PerHalf(_)), "{}", format.name());
            if !codes.has_min {
                let (Scales::PerBlock { m, .. } | Scales::PerHalf { m, .. }) = block.scales;
                assert_eq!(m, 0.0, "{}", format.name());
            }
        }
        assert_eq!(largest, codes.max, "largest code of {}", format.name());
    }
    assert_eq!(seen, 12);
}

/// A decoder that reads one bit wrongly must not pass: every bit of a block matters to some value.
#[test]
fn every_bit_of_a_block_changes_a_value() {
    for Golden { format, bytes, .. } in golden() {
        let (block_bytes, block_len) = (format.block_bytes(), format.block_len());
        let n = bytes.len() / block_bytes;
        let (mut out, mut flipped) = (vec![0.0; block_len], vec![0.0; block_len]);
        for bit in 0..8 * block_bytes {
            let changed = (0..n).any(|i| {
                let mut block = bytes[i * block_bytes..(i + 1) * block_bytes].to_vec();
                format.decode_block(&block, &mut out);
                block[bit / 8] ^= 1 << (bit % 8);
                format.decode_block(&block, &mut flipped);
                out.iter().zip(&flipped).any(|(a, b)| a.to_bits() != b.to_bits())
            });
            assert!(changed, "bit {bit} of a {} block has no effect", format.name());
        }
    }
}

#[test]
fn names_and_codes_lead_back_to_the_format() {
    for format in Format::ALL {
        assert_eq!(Format::from_name(format.name()), Some(format));
        assert_eq!(Format::from_name(&format.name().to_uppercase()), Some(format));
    }
    assert_eq!(Format::from_name("q4"), None);
    let known = (0..64).filter_map(Format::from_ggml_type).collect::<std::collections::BTreeSet<_>>();
    assert_eq!(known.into_iter().collect::<Vec<_>>(), in_gguf());
    assert!(in_gguf().iter().all(|&format| format.ggml_type().and_then(Format::from_ggml_type) == Some(format)));
}

#[test]
fn row_bytes_refuses_part_blocks_and_overflow() {
    assert_eq!(Format::Q4K.row_bytes(512), Some(288));
    assert_eq!(Format::Q4K.row_bytes(128), None);
    assert_eq!(Format::Q8_0.row_bytes(0), Some(0));
    assert_eq!(Format::F32.row_bytes(usize::MAX), None);
}
