//! Small good files, damaged at random by the ten thousand: each is refused or, if accepted, used in full without a
//! panic. The seeds are fixed, so a failure is found again.

use std::collections::BTreeMap;

use arc_device::format::Format;
use arc_engine::load::HeaderError;
use arc_engine::load::gguf::ValueType;
use arc_engine::load::testing::{
    GgufWriter, array, exercise_gguf, exercise_index, exercise_safetensors, safetensors_bytes,
};
use safetensors::SafeTensors;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// Numbers at which lengths, counts and offsets go wrong.
const EDGES: [u64; 12] = [0, 1, 4, 31, 32, 255, 1 << 16, 1 << 31, u32::MAX as u64, 1 << 62, u64::MAX - 31, u64::MAX];

/// One to four damages: bits flipped, numbers replaced, bytes removed, repeated or moved, the end cut off. `tokens` are
/// byte strings that mean something in the file's kind.
fn damage(good: &[u8], tokens: &[&[u8]], random: &mut Random) -> Vec<u8> {
    let mut bytes = good.to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len());
        let to = (at + random.below(24)).min(bytes.len());
        match random.below(8) {
            0 => bytes.truncate(at),
            1 => drop(bytes.drain(at..to)),
            2 => drop(
                bytes
                    .splice(at..at, good[random.below(good.len())..].iter().copied().take(to - at).collect::<Vec<_>>()),
            ),
            3 | 4 => {
                let edge = EDGES[random.below(EDGES.len())].to_le_bytes();
                let width = [1, 4, 8][random.below(3)];
                for (byte, edge) in bytes[at..].iter_mut().zip(&edge[..width]) {
                    *byte = *edge;
                }
            }
            5 => drop(bytes.splice(at..to, tokens[random.below(tokens.len())].iter().copied())),
            _ if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            _ => {}
        }
    }
    bytes
}

fn kind(error: &HeaderError) -> String {
    let debug = format!("{error:?}");
    debug.split([' ', '{']).next().unwrap_or_default().to_owned()
}

#[test]
fn damaged_gguf_files_are_refused_or_usable() {
    let good = GgufWriter::default()
        .str("general.architecture", "llama")
        .u32("general.alignment", 32)
        .value("b", ValueType::Bool, [1])
        .value("bools", ValueType::Array, array(ValueType::Bool, 3, &[0, 1, 0]))
        .value("i8s", ValueType::Array, array(ValueType::I8, 4, &[0, 1, 200, 3]))
        .value("c", ValueType::I64, i64::MIN.to_le_bytes())
        .strs("tokens", &["a", "", "né"])
        .tensor("a", Format::F32, &[2, 3], vec![1; 24])
        .tensor("b", Format::Q8_0, &[2, 64], vec![2; 136])
        .tensor("c", Format::Q4K, &[1, 1, 2, 256], vec![3; 288])
        .bytes();
    exercise_gguf(&good).expect("undamaged");
    let tokens: [&[u8]; 6] = [b"GGUF", b"general.alignment", &[9, 0, 0, 0], &[8, 0, 0, 0], b"\xff", &[0; 8]];
    let mut seen = BTreeMap::<String, u32>::new();
    for seed in 0..40_000 {
        let bytes = damage(&good, &tokens, &mut Random(seed));
        let kind = exercise_gguf(&bytes).map_or_else(|error| kind(&error), |()| "accepted".to_owned());
        *seen.entry(kind).or_default() += 1;
    }
    // The damage must reach every check: every kind of refusal that GGUF has.
    assert!(seen["accepted"] > 2_000, "{seen:?}");
    let expected = [
        "Alignment",
        "BigEndian",
        "Bool",
        "DimCount",
        "DuplicateKey",
        "DuplicateTensor",
        "EmptyName",
        "Magic",
        "Misaligned",
        "NestedArray",
        "Overlap",
        "PastEnd",
        "RowLength",
        "ShapeOverflow",
        "TensorType",
        "TooLarge",
        "Truncated",
        "Utf8",
        "ValueType",
        "Version",
        "ZeroDim",
        "accepted",
    ];
    assert_eq!(seen.keys().collect::<Vec<_>>(), expected, "{seen:?}");
}

#[test]
fn damaged_safetensors_files_are_refused_or_usable() {
    let header = concat!(
        r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"#,
        r#""b":{"dtype":"BF16","shape":[3],"data_offsets":[8,14]},"c":{"dtype":"I8","shape":[],"data_offsets":[14,15]}}  "#
    );
    let data = (0..15).collect::<Vec<_>>();
    let good = safetensors_bytes(header, &data);
    exercise_safetensors(&good).expect("undamaged");
    let words = [
        "a",
        "b",
        "c",
        "",
        "pt",
        "dtype",
        "F32",
        "BF16",
        "I8",
        "F16",
        "U9",
        "F4",
        "[2,1]",
        "[]",
        "[1,2]",
        "[0,8]",
        "[8,14]",
        "[14,15]",
        "[4,12]",
        "[8,0]",
        "[1,1,1,1,1,1,1]",
        "0",
        "1",
        "2",
        "8",
        "14",
        "15",
        "4294967296",
        "18446744073709551615",
    ];
    let mut seen = BTreeMap::<String, u32>::new();
    for seed in 0..40_000 {
        let mut random = Random(seed);
        // A damaged file, and, to get past the JSON, one whose header has words exchanged for others.
        let bytes = if seed % 2 == 0 {
            damage(&good, &[b"\"a\"", b"14", b"}", b"\xff"], &mut random)
        } else {
            let mut header = header.to_owned();
            for _ in 0..=random.below(3) {
                let (old, new) = (words[random.below(words.len())], words[random.below(words.len())]);
                header = header.replacen(old, new, 1 + random.below(2));
            }
            safetensors_bytes(header, &data)
        };
        let kind = match exercise_safetensors(&bytes) {
            Err(error) => kind(&error),
            Ok(header) => {
                // What we accept the reference reader accepts too, and reads alike.
                let theirs = SafeTensors::deserialize(&bytes).expect("accepted by the reference reader");
                assert_eq!(theirs.len(), header.tensors().len());
                for tensor in header.tensors() {
                    let view = theirs.tensor(&tensor.name).expect("the same names");
                    assert_eq!((view.shape(), view.data()), (&*tensor.shape, &bytes[tensor.range.clone()]));
                }
                "accepted".to_owned()
            }
        };
        *seen.entry(kind).or_default() += 1;
    }
    assert!(seen["accepted"] > 2_000, "{seen:?}");
    let expected = [
        "ByteCount",
        "DuplicateTensor",
        "EmptyName",
        "Hole",
        "Json",
        "Overlap",
        "PastEnd",
        "ShapeOverflow",
        "TensorType",
        "TooLarge",
        "Truncated",
        "Utf8",
        "ZeroDim",
        "accepted",
    ];
    assert_eq!(seen.keys().collect::<Vec<_>>(), expected, "{seen:?}");
}

#[test]
fn damaged_indexes_are_refused_or_usable() {
    let good =
        br#"{"metadata":{"total_size":12},"weight_map":{"c":"2.safetensors","a":"1.safetensors","b":"2.safetensors"}}"#;
    assert_eq!(exercise_index(good), Ok(3));
    let tokens: [&[u8]; 6] = [b"\"a\"", b"\"c\":\"1.safetensors\",", b"\"\"", b"{}", b"}", b"\\u0000"];
    let (mut accepted, mut twice) = (0, 0);
    for seed in 0..20_000 {
        match exercise_index(&damage(good, &tokens, &mut Random(seed))) {
            Ok(_) => accepted += 1,
            Err(problem) => twice += u32::from(problem.contains("listed twice")),
        }
    }
    assert!(accepted > 1_000 && twice > 10, "{accepted} accepted, {twice} with a name listed twice");
}
