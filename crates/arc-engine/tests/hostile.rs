//! Files built to be expensive: each is refused in under 100 ms, in a process that never holds 64 MiB.
//!
//! Every file is opened in a child process, whose peak of resident memory counts mapped pages too. Time is that of the
//! processor, which a busy machine does not stretch.

mod common;

use std::io::Write;
use std::path::Path;
use std::process::Command;

use arc_engine::load::ModelFile;
use arc_engine::load::gguf::ValueType;
use arc_engine::load::testing::{GgufWriter, TensorSpec, array, safetensors_bytes, string};
use common::Folder;

const OPEN: &str = "ARC_HOSTILE_FILE";

/// The child: opens the file that the environment names and prints what it cost. As a test of its own it does nothing.
#[test]
fn open_in_child() {
    let Some(path) = std::env::var_os(OPEN) else { return };
    let start = cpu_us();
    let result = ModelFile::open(Path::new(&path));
    let us = cpu_us() - start;
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    let peak_kib = peak.trim().trim_end_matches(" kB");
    let message = result.map_or_else(|error| error.to_string(), |_| "accepted".to_owned());
    println!("\ncost {us} {peak_kib} {message}");
}

/// Microseconds that this thread has run.
fn cpu_us() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    text.split(' ').next().expect("three fields").parse::<u64>().expect("nanoseconds") / 1_000
}

struct Cost {
    us: u64,
    peak_kib: u64,
    message: String,
}

fn open(path: &Path) -> Cost {
    let output = Command::new(std::env::current_exe().expect("this test"))
        .args(["open_in_child", "--exact", "--nocapture"])
        .env(OPEN, path)
        .output()
        .expect("this test starts again");
    let text = String::from_utf8(output.stdout).expect("text");
    let line = text.lines().find_map(|line| line.strip_prefix("cost ")).expect("the child says what it cost");
    let [us, peak_kib, message] = line.splitn(3, ' ').collect::<Vec<_>>().try_into().expect("three fields");
    Cost {
        us: us.parse().expect("a number"),
        peak_kib: peak_kib.parse().expect("a number"),
        message: message.replace(&format!("{}: ", path.display()), ""),
    }
}

/// Metadata `k` with an array of type `element`, and the promise of one more entry.
fn array_then_more(element: ValueType, len: u64, elements: &[u8]) -> Vec<u8> {
    let writer = GgufWriter { n_metadata: Some(2), ..GgufWriter::default() };
    writer.value("k", ValueType::Array, array(element, len, elements)).bytes()
}

fn many_tensors(n: usize) -> GgufWriter {
    let tensors = (0..n)
        .map(|i| TensorSpec {
            name: format!("blk.{i}.ffn_down.weight").into(),
            dims: vec![8],
            n_dims: None,
            code: 0,
            offset: None,
            data: vec![0; 32],
        })
        .collect();
    GgufWriter { tensors, ..GgufWriter::default() }
}

#[test]
fn expensive_files_are_refused_cheaply() {
    const N: usize = 1 << 16;
    let many_metadata = (0..N).fold(GgufWriter::default(), |writer, i| writer.str(&format!("key.{i}"), "value"));
    let many_metadata = many_metadata.value("last", ValueType::Bool, [2]);
    let metadata = vec![(vec![b'k'; 255], [&[0; 4][..], &[7]].concat()); N];
    let same_key = GgufWriter { metadata, ..GgufWriter::default() };
    let mut overlap = many_tensors(N);
    overlap.tensors[0].offset = Some(32);
    let entries =
        (0..N).map(|i| format!(r#""model.layers.{i}.w":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{}]}}"#, i + 1));
    let entries = entries.collect::<Vec<_>>().join(",");
    let listed = (0..270_000).map(|i| format!(r#""model.layers.{i}.experts.weight":"s.safetensors""#));
    let listed = listed.collect::<Vec<_>>().join(",");
    let long = "\\n".repeat(8 << 20);
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        (
            "strings.gguf",
            array_then_more(ValueType::Str, 5_242_870, &vec![0; 48 << 20]),
            "the key of metadata entry 2 of 2",
        ),
        (
            "pages.gguf",
            array_then_more(ValueType::Str, 10_000, &string([b'x'; 4088]).repeat(12_000)),
            "bytes of the key of metadata entry 2 of 2",
        ),
        (
            "text.gguf",
            GgufWriter::default().str("k", &"x".repeat(39 << 20)).u32("k", 1).bytes(),
            r#"metadata "k" appears twice"#,
        ),
        (
            "numbers.gguf",
            array_then_more(ValueType::F64, 6 << 20, &vec![0; 48 << 20]),
            "bytes of the header, with the value",
        ),
        (
            "metadata.gguf",
            {
                let mut w = many_metadata;
                w.n_metadata = Some(N as u64);
                w.metadata.remove(0);
                w.bytes()
            },
            r#"metadata "last" has the boolean 2"#,
        ),
        ("one key.gguf", same_key.bytes(), "appears twice"),
        ("tensors.gguf", overlap.bytes(), "overlap at byte"),
        ("more tensors.gguf", many_tensors(N + 1).bytes(), "the number of tensors: 65537 is above the limit"),
        ("entries.safetensors", safetensors_bytes(format!("{{{entries}}}"), &vec![0; N + 1]), "belong to no tensor"),
        (
            "more entries.safetensors",
            safetensors_bytes(format!(r#"{{{entries},"x":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#), &[]),
            "more than 65536 tensors",
        ),
        (
            "name.safetensors",
            safetensors_bytes(format!(r#"{{"{}":1}}"#, &long[..(16 << 20) - 64]), &[]),
            "the string at byte 1 is longer than the limit of 1048576",
        ),
        (
            "value.safetensors",
            safetensors_bytes(format!(r#"{{"a":"{}"}}"#, &long[..(16 << 20) - 64]), &[]),
            "the string at byte 5 is longer than the limit of 1048576",
        ),
        (
            "shape.safetensors",
            safetensors_bytes(
                format!(r#"{{"a":{{"shape":[{}1]}}}}"#, "1,".repeat(8 << 20)[..(16 << 20) - 64].to_owned()),
                &[],
            ),
            "at most 6 dimensions",
        ),
        (
            "metadata.safetensors",
            safetensors_bytes(
                format!(r#"{{"__metadata__":{{{}"a":1}}}}"#, r#""":"","#.repeat((16 << 20) / 6 - 20)),
                &[],
            ),
            "more than 65536 entries of __metadata__",
        ),
        ("index.json", format!(r#"{{"weight_map":{{{listed}}}}}"#).into_bytes(), "more than 262144 tensors"),
        ("long index.json", vec![b' '; (20 << 20) + 1], "above the limit"),
    ];
    let folder = Folder::new("hostile");
    // A build without optimisation is many times slower; its bound only tells a loop from a hang.
    let limit_us = if cfg!(debug_assertions) { 3_000_000 } else { 100_000 };
    for (name, bytes, expected) in cases {
        let path = folder.write(name, bytes);
        let mut cost = open(&path);
        // Beside other work a thread takes longer for the same: the least of a few times is its own.
        for _ in 0..4 {
            if cost.us >= limit_us {
                cost.us = cost.us.min(open(&path).us);
            }
        }
        println!("{name}: {} us, {} KiB: {:.100}", cost.us, cost.peak_kib, cost.message);
        assert!(cost.message.contains(expected), "{name}: {}", cost.message);
        assert!(cost.message.len() < 400, "{name}: {}", cost.message);
        assert!(cost.peak_kib < 64 << 10, "{name}: {} KiB", cost.peak_kib);
        assert!(cost.us < limit_us, "{name}: {} us", cost.us);
        std::fs::remove_file(path).expect("it was written");
    }
    // A sparse file of a terabyte, all of it one array.
    let path = folder.path().join("sparse.gguf");
    let mut file = std::fs::File::create(&path).expect("the folder can be written");
    let head = array_then_more(ValueType::U8, 1 << 39, &[]);
    file.write_all(&head).expect("it is small");
    file.set_len(1 << 40).expect("sparse files work here");
    let cost = open(&path);
    assert!(cost.message.contains("above the limit of 41943040"), "{}", cost.message);
    assert!(cost.us < limit_us && cost.peak_kib < 64 << 10, "{} us, {} KiB", cost.us, cost.peak_kib);
}
