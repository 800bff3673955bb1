//! Safetensors files: what is read from good ones, and the sentence that each bad one gets.

mod common;

use arc_device::format::Format;
use arc_engine::load::safetensors::{SafetensorsFile, SafetensorsHeader};
use arc_engine::load::testing::{GgufWriter, safetensors_bytes};
use arc_engine::load::{LoadError, ModelFile};
use common::Folder;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

const DTYPES: [(Dtype, &str); 22] = [
    (Dtype::BOOL, "bool"),
    (Dtype::F4, "f4"),
    (Dtype::F6_E2M3, "f6_e2m3"),
    (Dtype::F6_E3M2, "f6_e3m2"),
    (Dtype::U8, "u8"),
    (Dtype::I8, "i8"),
    (Dtype::F8_E5M2, "f8_e5m2"),
    (Dtype::F8_E4M3, "f8_e4m3"),
    (Dtype::F8_E8M0, "f8_e8m0"),
    (Dtype::F8_E4M3FNUZ, "f8_e4m3fnuz"),
    (Dtype::F8_E5M2FNUZ, "f8_e5m2fnuz"),
    (Dtype::I16, "i16"),
    (Dtype::U16, "u16"),
    (Dtype::F16, "f16"),
    (Dtype::BF16, "bf16"),
    (Dtype::I32, "i32"),
    (Dtype::U32, "u32"),
    (Dtype::F32, "f32"),
    (Dtype::C64, "c64"),
    (Dtype::F64, "f64"),
    (Dtype::I64, "i64"),
    (Dtype::U64, "u64"),
];

#[test]
fn every_type_reads_as_the_safetensors_crate_wrote_it() {
    let shapes: [&[usize]; 5] = [&[], &[3], &[2, 4], &[3, 1, 5], &[1, 2, 1, 2, 1, 4]];
    let content = (0..1_000).map(|i| (i * 7 % 251) as u8).collect::<Vec<_>>();
    let mut tensors = Vec::new();
    for (dtype, name) in DTYPES {
        for (i, shape) in shapes.iter().enumerate() {
            let n_bits = dtype.bitsize() * shape.iter().product::<usize>();
            if n_bits.is_multiple_of(8) {
                let view = TensorView::new(dtype, shape.to_vec(), &content[i..i + n_bits / 8]).expect("it fits");
                tensors.push((format!("{name}.{i}"), view));
            }
        }
    }
    let metadata = std::collections::HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let bytes = safetensors::serialize(tensors.clone(), Some(metadata)).expect("good tensors");
    let folder = Folder::new("types");
    let file = SafetensorsFile::open(&folder.write("types.safetensors", bytes)).expect("it is whole");
    let weights = file.weights();
    assert_eq!(weights.tensors().len(), tensors.len());
    let mut odd = 0;
    for (name, view) in &tensors {
        let tensor = weights.find(name).expect("present");
        assert_eq!((&*tensor.shape, weights.raw_bytes(tensor)), (view.shape(), view.data()), "{name}");
        assert_eq!(tensor.type_name, name.split_once('.').expect("a type and a number").0);
        odd += usize::from(!tensor.range.start.is_multiple_of(4));
    }
    assert!(odd > 10, "only {odd} tensors lie at odd places: the test shows too little");
    let formats = ["f32.2", "f16.2", "bf16.2"].map(|name| weights.tensor(name).expect("a weight format").format);
    assert_eq!(formats, [Format::F32, Format::F16, Format::Bf16]);
    let error = weights.tensor("i64.2").expect_err("not a weight format");
    assert!(error.to_string().contains(r#"tensor "i64.2" is stored as i64, which is not supported"#), "{error}");
}

/// A file with this header and so many bytes of data.
fn file(header: &str, n_data: usize) -> Vec<u8> {
    safetensors_bytes(header, &vec![7; n_data])
}

#[test]
fn each_lie_gets_its_own_sentence() {
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let two = |first: &str, second: &str, b: &str| {
        format!(
            r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":{first}}},"{b}":{{"dtype":"U8","shape":[4],"data_offsets":{second}}}}}"#
        )
    };
    let json = |problem: &str| format!("the safetensors header cannot be read: {problem}");
    let long = "n".repeat(256);
    let again = "fetch it again";
    let cases: Vec<(&str, Vec<u8>, String)> = vec![
        (
            "empty",
            vec![],
            format!(
                "the length of the header at byte 0 needs 8 bytes, but 0 are left: the file is truncated or damaged, {again}"
            ),
        ),
        (
            "header past the end",
            [&100u64.to_le_bytes()[..], b"{}"].concat(),
            format!("the header at byte 8 needs 100 bytes, but 2 are left: the file is truncated or damaged, {again}"),
        ),
        (
            "header too long",
            [&u64::MAX.to_le_bytes()[..], b"{}"].concat(),
            "bytes of the header: 18446744073709551615 is above the limit of 16777216".to_owned(),
        ),
        ("no header", file("", 0), json("it does not begin with {")),
        ("leading space", file(" {}", 0), json("it does not begin with {")),
        ("not closed", file("{", 0), json("EOF while parsing an object at line 1 column 1")),
        ("two objects", file("{}{}", 0), json("trailing characters at line 1 column 3")),
        (
            "not UTF-8",
            safetensors_bytes([b'{', b'"', 0xff, b'"', b':'], &[]),
            "the header at byte 8 is not valid UTF-8".to_owned(),
        ),
        (
            "no dtype",
            file(r#"{"a":{"shape":[1],"data_offsets":[0,1]}}"#, 1),
            json("missing field `dtype` at line 1 column 39"),
        ),
        (
            "unknown field",
            file(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"strides":[1]}}"#, 1),
            json("unknown field `strides`, expected one of `dtype`, `shape`, `data_offsets` at line 1 column 61"),
        ),
        (
            "control characters",
            file(r#"{"a":{"x\ny":1}}"#, 0),
            json("unknown field `x y`, expected one of `dtype`, `shape`, `data_offsets` at line 1 column 12"),
        ),
        (
            "field twice",
            file(r#"{"a":{"dtype":"U8","dtype":"U8"}}"#, 1),
            json("duplicate field `dtype` at line 1 column 26"),
        ),
        (
            "negative",
            file(&entry("U8", "[-1]", "[0,1]"), 1),
            json("invalid value: integer `-1`, expected u64 at line 1 column 30"),
        ),
        (
            "fraction",
            file(&entry("U8", "[1.0]", "[0,1]"), 1),
            json("invalid type: floating point `1.0`, expected u64 at line 1 column 31"),
        ),
        ("three offsets", file(&entry("U8", "[1]", "[0,1,2]"), 1), json("trailing characters at line 1 column 52")),
        (
            "many dims",
            file(&entry("U8", "[1,1,1,1,1,1,1]", "[0,1]"), 1),
            json("invalid length 7, expected at most 6 dimensions at line 1 column 42"),
        ),
        (
            "long name",
            file(&format!(r#"{{"{long}":1}}"#), 0),
            json("a name of 256 bytes is above the limit of 255 at line 1 column 259"),
        ),
        (
            "long quote",
            file(&format!(r#"{{"a":"{long}"}}"#), 0),
            json(&format!("invalid type: string \"{}... at line 1 column 263", &long[..98])),
        ),
        (
            "deep",
            file(&format!(r#"{{"__metadata__":{}"#, "[".repeat(100_000)), 0),
            json("invalid type: sequence, expected an object at line 1 column 16"),
        ),
        (
            "no name",
            file(r#"{"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, 1),
            "a tensor name at byte 8 is empty".to_owned(),
        ),
        ("dtype", file(&entry("Q9\\n", "[1]", "[0,1]"), 1), r#"tensor "a" has the unknown type "Q9\n""#.to_owned()),
        (
            "dim 0",
            file(&entry("U8", "[0,18446744073709551615,18446744073709551615]", "[0,0]"), 0),
            r#"tensor "a" has a dimension of 0 in its shape [0, 18446744073709551615, 18446744073709551615]"#
                .to_owned(),
        ),
        (
            "overflow",
            file(&entry("F32", "[4294967296,4294967296]", "[0,1]"), 1),
            r#"tensor "a" is impossibly large: shape [4294967296, 4294967296]"#.to_owned(),
        ),
        (
            "bits overflow",
            file(&entry("F32", "[1152921504606846976]", "[0,1]"), 1),
            r#"tensor "a" is impossibly large: shape [1152921504606846976]"#.to_owned(),
        ),
        (
            "size",
            file(&entry("F32", "[2]", "[0,7]"), 7),
            r#"tensor "a" of type f32 and shape [2] needs 8 bytes, but its offsets span 7"#.to_owned(),
        ),
        (
            "part byte",
            file(&entry("F4", "[3]", "[0,2]"), 2),
            r#"tensor "a" of type f4 and shape [3] needs 2 bytes, but its offsets span 2"#.to_owned(),
        ),
        (
            "reversed",
            file(&entry("U8", "[4]", "[4,0]"), 4),
            r#"tensor "a" of type u8 and shape [4] needs 4 bytes, but its offsets span 0"#.to_owned(),
        ),
        (
            "past the end",
            file(&entry("U8", "[4]", "[0,4]"), 3),
            format!(r#"tensor "a" ends at byte 65, but the file ends at 64: it is truncated or damaged, {again}"#),
        ),
        (
            "far past the end",
            file(&entry("U8", "[1]", "[18446744073709551614,18446744073709551615]"), 3),
            format!(
                r#"tensor "a" ends at byte 18446744073709551615, but the file ends at 102: it is truncated or damaged, {again}"#
            ),
        ),
        (
            "longer",
            file(&entry("U8", "[4]", "[0,4]"), 5),
            "bytes 65..66 belong to no tensor: the file is damaged or not written to its end".to_owned(),
        ),
        (
            "no tensors",
            file("{}", 1),
            "bytes 10..11 belong to no tensor: the file is damaged or not written to its end".to_owned(),
        ),
        (
            "hole",
            file(&two("[0,4]", "[5,9]", "b"), 9),
            "bytes 117..118 belong to no tensor: the file is damaged or not written to its end".to_owned(),
        ),
        (
            "hole at the start",
            file(&entry("U8", "[4]", "[1,5]"), 5),
            "bytes 61..62 belong to no tensor: the file is damaged or not written to its end".to_owned(),
        ),
        ("overlap", file(&two("[0,4]", "[3,7]", "b"), 7), r#"tensors "a" and "b" overlap at byte 116"#.to_owned()),
        ("shared range", file(&two("[0,4]", "[0,4]", "b"), 4), r#"tensors "a" and "b" overlap at byte 113"#.to_owned()),
        ("name twice", file(&two("[0,4]", "[0,4]", "a"), 4), r#"tensor "a" appears twice"#.to_owned()),
    ];
    const LAX: [&str; 6] = ["leading space", "unknown field", "dim 0", "many dims", "name twice", "no name"];
    let folder = Folder::new("st-lies");
    let mut n_lax = 0;
    for (name, bytes, expected) in cases {
        let path = folder.write(&format!("{name}.safetensors"), &bytes);
        let message = SafetensorsFile::open(&path).expect_err(name).to_string();
        assert_eq!(message, format!("{}: {expected}", path.display()), "{name}");
        // The reference reader refuses all of these too, but for those where we are stricter.
        let lax = LAX.contains(&name);
        assert_eq!(SafeTensors::deserialize(&bytes).is_ok(), lax, "{name}: accepted by the reference reader?");
        n_lax += usize::from(lax);
    }
    assert_eq!(n_lax, LAX.len());
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let header = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[],"data_offsets":[4,8]}}   "#;
    let bytes = file(header, 8);
    SafetensorsHeader::parse(&bytes, bytes.len() as u64).expect("whole");
    for len in 0..bytes.len() {
        let message = SafetensorsHeader::parse(&bytes[..len], len as u64).expect_err("cut").to_string();
        assert!(message.contains("truncated"), "{len} bytes: {message}");
    }
}

fn shard(tensors: &[(&str, u8)]) -> Vec<u8> {
    let entries = tensors.iter().enumerate().map(|(i, (name, _))| {
        format!(r#""{name}":{{"dtype":"U8","shape":[4],"data_offsets":[{},{}]}}"#, 4 * i, 4 * i + 4)
    });
    let header = format!("{{{}}}", entries.collect::<Vec<_>>().join(","));
    safetensors_bytes(header, &tensors.iter().flat_map(|&(_, byte)| [byte; 4]).collect::<Vec<_>>())
}

#[test]
fn shards_are_joined_and_must_agree_with_the_index() {
    let folder = Folder::new("shards");
    let index = |map: &str| {
        folder.write(
            "model.safetensors.index.json",
            format!(r#"{{"metadata":{{"total_size":12}},"weight_map":{{{map}}}}}"#),
        )
    };
    let (one, two) = ("model-1.safetensors", "model-2.safetensors");
    let good = format!(r#""c":"{two}","a":"{one}","b":"{two}""#);
    folder.write(one, shard(&[("a", 1)]));
    folder.write(two, shard(&[("b", 2), ("c", 3)]));
    let index_path = index(&good);
    for path in [folder.path(), &index_path] {
        let file = ModelFile::open(path).expect("index and shards agree");
        let weights = file.weights().expect("a file");
        for (name, byte) in [("a", 1), ("b", 2), ("c", 3)] {
            assert_eq!(weights.raw_bytes(weights.find(name).expect("present")), [byte; 4]);
        }
        assert_eq!(weights.tensors().len(), 3);
        let ModelFile::Safetensors(file) = file else { panic!("a folder is safetensors") };
        assert_eq!(file.folder(), folder.path());
    }
    let refused = |expected: &str| {
        let message = ModelFile::open(folder.path()).expect_err(expected).to_string();
        assert_eq!(message.replace(&format!("{}/", folder.path().display()), ""), expected);
    };
    const INDEX: &str = "model.safetensors.index.json";
    index(&format!(r#"{good},"d":"{one}""#));
    refused(&format!(r#"{INDEX}: the index lists tensor "d" in {one}, but it is not there"#));
    index(&format!(r#"{good},"aa":"{one}""#));
    refused(&format!(r#"{INDEX}: the index lists tensor "aa" in {one}, but it is not there"#));
    index(&format!(r#""a":"{one}","c":"{two}""#));
    refused(&format!(r#"{INDEX}: tensor "b" of {two} is not listed in the index: the files are of different models"#));
    index(&format!(r#""a":"{one}","b":"{two}""#));
    refused(&format!(r#"{INDEX}: tensor "c" of {two} is not listed in the index: the files are of different models"#));
    index(&format!(r#""a":"{one}","b":"{one}","c":"{two}""#));
    refused(&format!(r#"{INDEX}: the index lists tensor "b" in {one}, but it is in {two}"#));
    index(&format!(r#"{good},"a":"{one}""#));
    refused(&format!(r#"{INDEX}: the index cannot be used: tensor "a" is listed twice"#));
    index("");
    refused(&format!("{INDEX}: the index lists no tensors"));
    folder.write(INDEX, "[]");
    refused(&format!(
        "{INDEX}: the index cannot be used: invalid length 0, expected an object with a weight_map at line 1 column 2"
    ));
    for outside in ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", "x/", "a\\nb"] {
        index(&format!(r#""a":"{outside}""#));
        refused(&format!("{INDEX}: the index names the shard \"{outside}\", which is no file of this folder"));
    }
    index(&good);
    folder.write(two, shard(&[("a", 2), ("b", 2), ("c", 3)]));
    refused(&format!(r#"{two}: tensor "a" is also in {one}"#));
    let whole = shard(&[("b", 2), ("c", 3)]);
    folder.write(two, &whole[..whole.len() - 1]);
    refused(&format!(
        r#"{two}: tensor "c" ends at byte 121, but the file ends at 120: it is truncated or damaged, fetch it again"#
    ));
    std::fs::remove_file(folder.path().join(two)).expect("it was there");
    refused(&format!(
        "{two} is missing or unreadable (No such file or directory (os error 2)): 2 files make up this model, put them in one folder"
    ));
}

#[test]
fn the_content_decides_what_a_file_is() {
    let folder = Folder::new("kinds");
    let gguf = folder.write("a.bin", GgufWriter::default().bytes());
    assert!(matches!(ModelFile::open(&gguf), Ok(ModelFile::Gguf(_))));
    let one = folder.write("b.bin", shard(&[("a", 1)]));
    assert!(matches!(ModelFile::open(&one), Ok(ModelFile::Safetensors(_))));
    let message = |path: &std::path::Path| {
        let message = ModelFile::open(path).expect_err("no model").to_string();
        message.replace(&format!("{}/", folder.path().display()), "")
    };
    let page = folder.write("c.bin", "<!DOCTYPE html>");
    assert_eq!(message(&page), r#"c.bin: neither a GGUF nor a safetensors file: it begins with "<!DOCTYP""#);
    let page = folder.write("c.gguf", "<!DOCTYPE html>");
    assert_eq!(message(&page), r#"c.gguf: not a GGUF file: it begins with "<!DOCTYP" instead of "GGUF""#);
    assert_eq!(message(&folder.path().join("absent")), "cannot open absent: No such file or directory (os error 2)");
    assert!(matches!(ModelFile::open(folder.path()), Err(LoadError::EmptyFolder { .. })));
    folder.write("model.safetensors", shard(&[("a", 1)]));
    assert_eq!(ModelFile::open(folder.path()).expect("the usual name").weights().expect("a file").tensors().len(), 1);
}
