//! GGUF files: what is read from good ones, and the sentence that each bad one gets.

mod common;

use std::fmt::Write;
use std::path::Path;

use arc_device::format::Format;
use arc_engine::load::LoadError;
use arc_engine::load::gguf::{Array, GgufFile, Optional, Value, ValueType};
use arc_engine::load::testing::{GgufWriter, TensorSpec, array, string};
use common::{Folder, real_model};

fn small() -> GgufWriter {
    GgufWriter::default()
        .str("general.architecture", "llama")
        .u32("llama.block_count", 2)
        .f32("llama.rope.freq_base", 10_000.0)
        .strs("tokenizer.ggml.tokens", &["a", "", "né"])
        .tensor("a.weight", Format::F32, &[2, 3], (0..24).collect())
        .tensor("b.weight", Format::Q8_0, &[2, 64], (0..136).collect())
}

#[test]
fn a_small_file_reads_back() {
    let folder = Folder::new("small");
    let path = folder.write("small.gguf", small().bytes());
    let file = GgufFile::open(&path).expect("it is whole");
    let metadata = file.metadata();
    assert_eq!(metadata.get_str("general.architecture").expect("present"), "llama");
    assert_eq!(metadata.get_u32("llama.block_count").expect("present"), 2);
    assert_eq!(metadata.get_f32("llama.rope.freq_base").expect("present"), 10_000.0);
    let tokens = metadata.get_str_array("tokenizer.ggml.tokens").expect("present");
    assert_eq!(tokens.iter().collect::<Vec<_>>(), ["a", "", "né"]);
    assert_eq!(metadata.iter().len(), 4);
    let weights = file.weights();
    let a = weights.tensor("a.weight").expect("present");
    assert_eq!((a.format, &*a.shape, a.rows(), a.cols()), (Format::F32, &[2, 3][..], 2, 3));
    assert_eq!(weights.bytes(&a), (0..24).collect::<Vec<u8>>());
    let b = weights.tensor_of_shape("b.weight", &[2, 64]).expect("present");
    assert_eq!(weights.bytes(&b), (0..136).collect::<Vec<u8>>());
    weights.release(&b);
    assert_eq!(weights.bytes(&b), (0..136).collect::<Vec<u8>>());
    assert_eq!(weights.file_bytes(), small().bytes().len() as u64);
}

#[test]
fn every_value_type_reads_back() {
    let values: [(&str, ValueType, &[u8], Value<'_>); 12] = [
        ("u8", ValueType::U8, &[200], Value::Unsigned(200)),
        ("i8", ValueType::I8, &[200], Value::Signed(-56)),
        ("u16", ValueType::U16, &[1, 200], Value::Unsigned(51_201)),
        ("i16", ValueType::I16, &[1, 200], Value::Signed(-14_335)),
        ("u32", ValueType::U32, &[0, 0, 0, 128], Value::Unsigned(1 << 31)),
        ("i32", ValueType::I32, &[0, 0, 0, 128], Value::Signed(-1 << 31)),
        ("f32", ValueType::F32, &1.5f32.to_le_bytes(), Value::F32(1.5)),
        ("bool", ValueType::Bool, &[1], Value::Bool(true)),
        ("str", ValueType::Str, &string("né"), Value::Str("né")),
        ("u64", ValueType::U64, &u64::MAX.to_le_bytes(), Value::Unsigned(u64::MAX)),
        ("i64", ValueType::I64, &i64::MIN.to_le_bytes(), Value::Signed(i64::MIN)),
        ("f64", ValueType::F64, &1e300f64.to_le_bytes(), Value::F64(1e300)),
    ];
    let mut writer = GgufWriter::default();
    for (key, value_type, bytes, _) in values {
        writer = writer.value(key, value_type, bytes);
        writer = writer.value(&format!("{key}.array"), ValueType::Array, array(value_type, 2, &bytes.repeat(2)));
    }
    let folder = Folder::new("types");
    let file = GgufFile::open(&folder.write("types.gguf", writer.bytes())).expect("it is whole");
    let metadata = file.metadata();
    for (key, value_type, _, expected) in values {
        assert_eq!(metadata.get(key), Some(expected), "{key}");
        assert_eq!(metadata.value_type(key), Some(value_type));
        let Some(Value::Array(array)) = metadata.get(&format!("{key}.array")) else { panic!("{key}.array") };
        assert_eq!((array.element(), array.iter().collect::<Vec<_>>()), (value_type, vec![expected; 2]), "{key}");
    }
    assert_eq!(metadata.get_u32("u8").expect("fits"), 200);
    assert_eq!(metadata.get_u64("u64").expect("fits"), u64::MAX);
    assert_eq!(metadata.get_f32("f64").expect("a float"), f32::INFINITY);
    assert_eq!(metadata.get_i32_array("u16.array").expect("fits"), [51_201; 2]);
    assert_eq!(metadata.get_f32_array("f32.array").expect("floats"), [1.5; 2]);
    assert_eq!(metadata.get_bool_array("bool.array").expect("bools"), [true; 2]);
    assert_eq!(metadata.get_u32("absent").optional().expect("absence is fine"), None);
    assert!(metadata.get_u32("str").optional().is_err());

    let message = |error: LoadError| error.to_string().split_once("types.gguf: ").expect("a path").1.to_owned();
    let cases = [
        (metadata.get_u32("absent").map(drop), r#"the metadata "absent" is missing"#),
        (
            metadata.get_u32("u64").map(drop),
            "should be an integer that fits in u32, but is the u64 18446744073709551615",
        ),
        (metadata.get_u32("i8").map(drop), "should be an integer that fits in u32, but is the i8 -56"),
        (metadata.get_f32("u8").map(drop), "should be a float, but is the u8 200"),
        (metadata.get_bool("u8").map(drop), "should be a bool, but is the u8 200"),
        (metadata.get_str("u8").map(drop), "should be a string, but is the u8 200"),
        (metadata.get_str_array("str").map(drop), "should be an array of strings, but is a string"),
        (metadata.get_str_array("u8.array").map(drop), "should be an array of strings, but is an array of u8"),
        (
            metadata.get_i32_array("u32.array").map(drop),
            "integers that fit in i32, but is an array of u32 whose element 0 is 2147483648",
        ),
        (metadata.get_f32_array("u8.array").map(drop), "floats, but is an array of u8 whose element 0 is 200"),
    ];
    for (result, expected) in cases {
        let message = message(result.expect_err(expected));
        assert!(message.ends_with(expected), "{message}");
    }
}

/// Lines as `tests/reference/gguf_listing.py` writes them with the `gguf` package.
fn listing(file: &GgufFile) -> String {
    let mut out = String::new();
    for (key, value) in file.metadata().iter() {
        let value_type = file.metadata().value_type(key).expect("it was listed").name();
        let line = match value {
            Value::Array(array) => format!("[{}; {}] {:08x}", array.element().name(), array.len(), crc(array)),
            Value::Str(text) => format!("string {} {:08x}", text.len(), crc32fast::hash(text.as_bytes())),
            Value::F32(x) => format!("f32 {:08x}", x.to_bits()),
            other => format!("{value_type} {other}"),
        };
        writeln!(out, "meta {key} {line}").expect("strings grow");
    }
    for tensor in file.weights().tensors() {
        let shape = tensor.shape.iter().map(usize::to_string).collect::<Vec<_>>().join("x");
        let (start, crc) = (tensor.range.start, crc32fast::hash(file.weights().raw_bytes(tensor)));
        let (name, type_name, len) = (&tensor.name, tensor.type_name, tensor.range.len());
        writeln!(out, "tensor {name} {type_name} {shape} {start} {len} {crc:08x}").expect("strings grow");
    }
    out
}

fn crc(array: Array<'_>) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    for value in array.iter() {
        match value {
            Value::Str(text) => hasher.update(&[text.as_bytes(), &[0]].concat()),
            Value::Signed(x) => hasher.update(&i32::try_from(x).expect("an i32").to_le_bytes()),
            Value::F32(x) => hasher.update(&x.to_le_bytes()),
            other => panic!("the golden models have no array with {other:?}"),
        }
    }
    hasher.finalize()
}

#[test]
fn real_models_read_as_the_gguf_package_reads_them() {
    for name in ["smollm2-135m-instruct-q4_1", "gemma-3-270m-q4_k_m"] {
        let file = GgufFile::open(&real_model(&format!("{name}.gguf"))).expect("a real model");
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/golden/gguf_{name}.txt"));
        let golden = std::fs::read_to_string(golden).expect("a committed file");
        let ours = listing(&file);
        for (ours, golden) in ours.lines().zip(golden.lines()) {
            assert_eq!(ours, golden, "{name}");
        }
        assert_eq!(ours.lines().count(), golden.lines().count(), "{name}");
    }
}

/// Opens a file that must be refused; returns the message without the path.
fn refusal(folder: &Folder, name: &str, bytes: &[u8]) -> String {
    let path = folder.write(&format!("{name}.gguf"), bytes);
    let error = GgufFile::open(&path).expect_err(name);
    let message = error.to_string();
    let message = message.strip_prefix(&format!("{}: ", path.display())).unwrap_or(&message);
    assert!(!message.contains('\n') && !message.ends_with('.'), "{message}");
    message.to_owned()
}

/// A metadata entry that is only a key and whatever follows.
fn raw(mut writer: GgufWriter, key: &[u8], typed: &[u8]) -> GgufWriter {
    writer.metadata.push((key.into(), typed.into()));
    writer
}

fn with_tensor(change: impl FnOnce(&mut TensorSpec)) -> GgufWriter {
    let mut writer = small();
    change(&mut writer.tensors[1]);
    writer
}

#[test]
fn each_lie_gets_its_own_sentence() {
    let u32_array = |len: u64| array(ValueType::U32, len, &[0; 8]);
    let cases: Vec<(&str, GgufWriter, &str)> = vec![
        (
            "magic",
            GgufWriter { magic: *b"GGML", ..small() },
            r#"not a GGUF file: it begins with "GGML\x03\x00\x00\x00" instead of "GGUF""#,
        ),
        (
            "version 1",
            GgufWriter { version: 1, ..small() },
            "GGUF version 1 is not supported: versions 2 and 3 are; convert the model again",
        ),
        (
            "version 4",
            GgufWriter { version: 4, ..small() },
            "GGUF version 4 is not supported: versions 2 and 3 are; convert the model again",
        ),
        (
            "version 0",
            GgufWriter { version: 0, ..small() },
            "GGUF version 0 is not supported: versions 2 and 3 are; convert the model again",
        ),
        (
            "big-endian",
            GgufWriter { version: 3 << 24, ..small() },
            "a big-endian GGUF file: convert it to little-endian first",
        ),
        (
            "tensor count",
            GgufWriter { n_tensors: Some(u64::MAX), ..small() },
            "the number of tensors: 18446744073709551615 is above the limit of 65536",
        ),
        (
            "metadata count",
            GgufWriter { n_metadata: Some(1 << 40), ..small() },
            "the number of metadata entries: 1099511627776 is above the limit of 65536",
        ),
        (
            "key length",
            {
                let mut bytes = small();
                bytes.metadata.insert(0, (vec![b'k'; 256], vec![]));
                bytes
            },
            "bytes of the key of metadata entry 1 of 5: 256 is above the limit of 255",
        ),
        ("empty key", raw(small(), b"", &[]), "the key of metadata entry 5 of 5 at byte 211 is empty"),
        (
            "key not UTF-8",
            raw(small(), &[0xff], &[]),
            "the key of metadata entry 5 of 5 at byte 219 is not valid UTF-8",
        ),
        (
            "value type",
            raw(small(), b"k", &13u32.to_le_bytes()),
            r#"metadata "k" at byte 220 has the unknown value type 13"#,
        ),
        (
            "element type",
            small().value("k", ValueType::Array, [99, 0, 0, 0]),
            r#"metadata "k" at byte 224 has the unknown value type 99"#,
        ),
        (
            "nested array",
            small().value("k", ValueType::Array, array(ValueType::Array, 1, &u32_array(2))),
            r#"metadata "k" is an array of arrays, which is not supported"#,
        ),
        (
            "array length",
            small().value("k", ValueType::Array, u32_array(1 << 62)),
            r#"the value of metadata "k" at byte 236 needs 18446744073709551615 bytes, but 284 are left: the file is truncated or damaged, fetch it again"#,
        ),
        (
            "array of strings",
            small().value("k", ValueType::Array, array(ValueType::Str, 1 << 61, &[])),
            r#"the array of strings in metadata "k" at byte 236 needs 18446744073709551615 bytes, but 284 are left: the file is truncated or damaged, fetch it again"#,
        ),
        (
            "string length",
            small().value("k", ValueType::Str, u64::MAX.to_le_bytes()),
            r#"the string in metadata "k" at byte 232 needs 18446744073709551615 bytes, but 288 are left: the file is truncated or damaged, fetch it again"#,
        ),
        (
            "string not UTF-8",
            small().value("k", ValueType::Str, string([b'a', 0xff])),
            r#"the string in metadata "k" at byte 232 is not valid UTF-8"#,
        ),
        (
            "bool",
            small().value("k", ValueType::Bool, [2]),
            r#"metadata "k" has the boolean 2 at byte 224, neither 0 nor 1"#,
        ),
        (
            "bool in array",
            small().value("k", ValueType::Array, array(ValueType::Bool, 3, &[0, 1, 7])),
            r#"metadata "k" has the boolean 7 at byte 238, neither 0 nor 1"#,
        ),
        ("duplicate key", small().u32("llama.block_count", 3), r#"metadata "llama.block_count" appears twice"#),
        (
            "alignment 0",
            small().u32("general.alignment", 0),
            "general.alignment is 0: a power of two from 8 to 65536 is needed",
        ),
        (
            "alignment 48",
            small().u32("general.alignment", 48),
            "general.alignment is 48: a power of two from 8 to 65536 is needed",
        ),
        (
            "alignment 2^31",
            small().u32("general.alignment", 1 << 31),
            "general.alignment is 2147483648: a power of two from 8 to 65536 is needed",
        ),
        (
            "alignment type",
            small().str("general.alignment", "32"),
            "general.alignment is of type string: a power of two from 8 to 65536 is needed",
        ),
        ("no name", with_tensor(|t| t.name.clear()), "the name of tensor 2 of 2 at byte 259 is empty"),
        ("no dims", with_tensor(|t| t.n_dims = Some(0)), r#"tensor "b.weight" has 0 dimensions: 1 to 4 are supported"#),
        (
            "many dims",
            with_tensor(|t| t.n_dims = Some(u32::MAX)),
            r#"tensor "b.weight" has 4294967295 dimensions: 1 to 4 are supported"#,
        ),
        ("dim 0", with_tensor(|t| t.dims[1] = 0), r#"tensor "b.weight" has a dimension of 0 in its shape [64, 0]"#),
        (
            "dims overflow",
            with_tensor(|t| t.dims = vec![1 << 32, 1 << 32, 1 << 32]),
            r#"tensor "b.weight" is impossibly large: shape [4294967296, 4294967296, 4294967296]"#,
        ),
        (
            "bytes overflow",
            with_tensor(|t| t.dims = vec![1 << 62, 8]),
            r#"tensor "b.weight" is impossibly large: shape [4611686018427387904, 8]"#,
        ),
        (
            "part block",
            with_tensor(|t| t.dims[0] = 63),
            r#"tensor "b.weight" has rows of 63 values, no whole number of q8_0 blocks of 32"#,
        ),
        ("type", with_tensor(|t| t.code = 77), r#"tensor "b.weight" has the unknown type 77"#),
        ("removed type", with_tensor(|t| t.code = 4), r#"tensor "b.weight" has the unknown type 4"#),
        (
            "misaligned",
            with_tensor(|t| t.offset = Some(33)),
            r#"tensor "b.weight" starts at byte 33 of the tensor data, no multiple of the alignment 32"#,
        ),
        (
            "past the end",
            with_tensor(|t| t.offset = Some(64)),
            r#"tensor "b.weight" ends at byte 520, but the file ends at 488: it is truncated or damaged, fetch it again"#,
        ),
        (
            "far past the end",
            with_tensor(|t| t.offset = Some(u64::MAX - 31)),
            r#"tensor "b.weight" ends at byte 18446744073709551615, but the file ends at 488: it is truncated or damaged, fetch it again"#,
        ),
        (
            "larger than the file",
            with_tensor(|t| t.dims[1] = 1 << 40),
            r#"tensor "b.weight" ends at byte 74766790689120, but the file ends at 488: it is truncated or damaged, fetch it again"#,
        ),
        ("overlap", with_tensor(|t| t.offset = Some(0)), r#"tensors "a.weight" and "b.weight" overlap at byte 320"#),
        ("duplicate tensor", with_tensor(|t| t.name = b"a.weight".into()), r#"tensor "a.weight" appears twice"#),
    ];
    let folder = Folder::new("lies");
    let n_cases = cases.len();
    let mut seen = std::collections::BTreeSet::new();
    for (name, writer, expected) in cases {
        assert_eq!(refusal(&folder, name, &writer.bytes()), expected, "{name}");
        seen.insert(expected);
    }
    // Three versions share a sentence pattern but name different numbers, so no two cases end alike.
    assert_eq!(seen.len(), n_cases);
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let folder = Folder::new("cut");
    let bytes = small().bytes();
    for len in 0..bytes.len() {
        let message = refusal(&folder, "cut", &bytes[..len]);
        assert!(message.contains("truncated") && message.contains("fetch it again"), "{len} bytes: {message}");
    }
    let whole = real_model("smollm2-135m-instruct-q4_1.gguf");
    let bytes = std::fs::read(&whole).expect("a real model");
    for len in [3, 100, 1 << 20, bytes.len() / 2, bytes.len() - 1] {
        let message = refusal(&folder, "real", &bytes[..len]);
        assert!(message.contains("truncated") && message.contains("fetch it again"), "{len} bytes: {message}");
    }
}

#[test]
fn absent_files_folders_and_other_kinds_are_refused() {
    let folder = Folder::new("absent");
    let path = folder.path().join("absent.gguf");
    let message = GgufFile::open(&path).expect_err("it is absent").to_string();
    assert_eq!(message, format!("cannot open {}: No such file or directory (os error 2)", path.display()));
    let message = GgufFile::open(folder.path()).expect_err("a folder").to_string();
    assert_eq!(message, format!("cannot open {}: not a regular file", folder.path().display()));
}

#[test]
fn absent_and_unusable_tensors_are_named() {
    let folder = Folder::new("tensors");
    let mut writer = small().tensor("c.weight", Format::F32, &[64], vec![0; 256]);
    writer.tensors[2].code = 26;
    let path = folder.write("model.gguf", writer.bytes());
    let file = GgufFile::open(&path).expect("types that are not needed do no harm");
    let weights = file.weights();
    let message = |error: LoadError| error.to_string().split_once("model.gguf: ").expect("a path").1.to_owned();
    assert_eq!(
        message(weights.tensor("d.weight").expect_err("absent")),
        r#"there is no tensor "d.weight": the file is incomplete or holds another kind of model"#
    );
    assert_eq!(
        message(weights.tensor("c.weight").expect_err("i32")),
        "tensor \"c.weight\" is stored as i32, which is not supported; use one of f32, f16, bf16, q8_0, q4_0, q4_1, \
         q5_0, q5_1, q2_k, q3_k, q4_k, q5_k, q6_k, iq2_xxs, mxfp4, fp8"
    );
    assert_eq!(
        message(weights.tensor_of_shape("a.weight", &[3, 2]).expect_err("transposed")),
        r#"tensor "a.weight" has shape [2, 3], but the metadata asks for [3, 2]"#
    );
    assert_eq!(weights.raw_bytes(weights.find("c.weight").expect("present")).len(), 256);
}

fn part(no: u16, count: u16, name: &str) -> GgufWriter {
    GgufWriter::default()
        .value("split.no", ValueType::U16, no.to_le_bytes())
        .value("split.count", ValueType::U16, count.to_le_bytes())
        .value("split.tensors.count", ValueType::I32, i32::from(count).to_le_bytes())
        .u32("of.part", no.into())
        .tensor(name, Format::F32, &[8], vec![no as u8; 32])
}

#[test]
fn any_part_of_a_split_model_opens_all_of_them() {
    let folder = Folder::new("split");
    let write = |no: u16, writer: &GgufWriter| folder.write(&format!("m-{:05}-of-00003.gguf", no + 1), writer.bytes());
    let parts = [part(0, 3, "c"), part(1, 3, "a"), part(2, 3, "b")];
    for (no, writer) in parts.iter().enumerate() {
        write(no as u16, writer);
    }
    for no in 1..=3 {
        let file = GgufFile::open(&folder.path().join(format!("m-{no:05}-of-00003.gguf"))).expect("all are there");
        assert_eq!(file.metadata().get_u32("of.part").expect("present"), 0, "metadata of the first part");
        let weights = file.weights();
        for (name, byte) in [("a", 1), ("b", 2), ("c", 0)] {
            assert_eq!(weights.bytes(&weights.tensor(name).expect("present")), [byte; 32]);
        }
        assert_eq!(weights.files().len(), 3);
        assert_eq!(weights.file_bytes(), parts.iter().map(|part| part.bytes().len() as u64).sum::<u64>());
    }
    let first = folder.path().join("m-00001-of-00003.gguf");
    let refused = |expected: &str| {
        let message = GgufFile::open(&first)
            .expect_err(expected)
            .to_string()
            .replace(&format!("{}/", folder.path().display()), "");
        assert_eq!(message, expected);
    };
    write(1, &part(2, 3, "a"));
    refused("m-00002-of-00003.gguf: by its name this is part 2 of 3, but by its metadata part 3 of 3");
    write(1, &part(1, 3, "c"));
    refused(r#"m-00002-of-00003.gguf: tensor "c" is also in m-00001-of-00003.gguf"#);
    write(1, &part(1, 3, "a").tensor("d", Format::F32, &[1], vec![0; 4]));
    refused("m-00001-of-00003.gguf: the parts of this model should have 3 tensors together, but have 4");
    write(1, &GgufWriter { version: 9, ..part(1, 3, "a") });
    refused("m-00002-of-00003.gguf: GGUF version 9 is not supported: versions 2 and 3 are; convert the model again");
    std::fs::remove_file(folder.path().join("m-00002-of-00003.gguf")).expect("it was there");
    refused(
        "m-00002-of-00003.gguf is missing or unreadable (No such file or directory (os error 2)): 3 files make up this model, put them in one folder",
    );
    let path = folder.write("renamed.gguf", part(0, 3, "c").bytes());
    let message = GgufFile::open(&path).expect_err("no name to go by").to_string();
    assert!(message.ends_with("the others cannot be found: give it its name back"), "{message}");
}
