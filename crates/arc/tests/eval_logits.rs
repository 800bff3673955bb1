//! `arc eval logits` against the goldens of the fixtures, through files alone.

mod common;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use common::{arc, refused};
use serde_json::Value;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

/// Shape and words of a tensor.
fn tensor(path: &Path, name: &str) -> (Vec<u64>, Vec<[u8; 4]>) {
    let bytes = fs::read(path).expect("the file is there");
    let (len, rest) = bytes.split_first_chunk::<8>().expect("a length");
    let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let header: Value = serde_json::from_slice(header).expect("JSON");
    let numbers = |field: &str| -> Vec<u64> {
        let list = header[name][field].as_array().expect("an array").iter();
        list.map(|number| number.as_u64().expect("a number")).collect()
    };
    let range = numbers("data_offsets");
    let words = data[range[0] as usize..range[1] as usize].as_chunks::<4>().0.to_vec();
    (numbers("shape"), words)
}

fn floats(words: &[[u8; 4]]) -> Vec<f32> {
    words.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

struct Case {
    folder: tempfile::TempDir,
    model: PathBuf,
}

impl Case {
    fn new(model: &str, ids: &[[u8; 4]]) -> Case {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let ids: Vec<String> = ids.iter().map(|id| u32::from_le_bytes(*id).to_string()).collect();
        fs::write(folder.path().join("ids"), ids.join(" ")).expect("it is writable");
        Case { folder, model: fixture(model) }
    }

    fn logits(&self, args: &[&str]) -> (Vec<u64>, Vec<f32>) {
        let at = |name: &str| self.folder.path().join(name);
        let mut command = arc();
        command.args(["eval", "logits"]).arg(&self.model).arg("--ids").arg(at("ids")).arg("--out").arg(at("out"));
        let output = command.args(args).output().expect("the binary is built");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let (shape, words) = tensor(&at("out"), "logits");
        (shape, floats(&words))
    }
}

fn worst(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn decoders_give_their_goldens() {
    for name in ["llama", "qwen2", "qwen3", "gemma3"] {
        let golden = fixture(&format!("tiny/{name}/golden.safetensors"));
        let case = Case::new(&format!("tiny/{name}"), &tensor(&golden, "prompt").1);
        let (shape, got) = case.logits(&[]);
        let (want_shape, want) = tensor(&golden, "logits");
        assert_eq!(shape, want_shape, "{name}");
        let error = worst(&got, &floats(&want));
        assert!(error < 2e-2, "{name}: {error}");
        let (_, chunked) = case.logits(&["--chunk", "3", "--threads", "1"]);
        assert!(chunked.iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits()), "{name} in chunks of 3");
    }
}

#[test]
fn deepseek_v4_gives_its_goldens_in_every_arithmetic() {
    let golden = fixture("deepseek-v4-tiny/golden.safetensors");
    let mid = Case::new("deepseek-v4-tiny/native", &tensor(&golden, "mid.input_ids").1);
    for (numerics, name, most) in [("reference", "mid.logits", 1e-4), ("simulated", "mid.kvix.logits", 1e-3)] {
        for chunk in ["1", "16", "128"] {
            let (_, got) = mid.logits(&["--numerics", numerics, "--chunk", chunk]);
            let error = worst(&got, &floats(&tensor(&golden, name).1));
            assert!(error <= most, "{numerics} in chunks of {chunk}: {error}");
        }
    }
    let serving = fixture("deepseek-v4-tiny/serving.safetensors");
    let steady = Case::new("deepseek-v4-tiny/native", &tensor(&serving, "steady.input_ids").1);
    let error = worst(&steady.logits(&[]).1, &floats(&tensor(&serving, "steady.serving.logits").1));
    assert!(error <= 1e-4, "serving: {error}");
}

#[test]
fn what_cannot_be_is_refused() {
    let quick = Duration::from_secs(5);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().join("out");
    for (ids, numerics, model, part) in [
        ("1 2 x", "serving", "tiny/llama", "where a token id must be"),
        ("[1, 99999999]", "serving", "tiny/llama", "the vocabulary ends at"),
        ("", "serving", "tiny/llama", "no token ids"),
        ("1", "reference", "tiny/llama", "serving numerics only"),
    ] {
        let file = folder.path().join("ids");
        fs::write(&file, ids).expect("it is writable");
        let mut command = arc();
        command.args(["eval", "logits", "--numerics", numerics]).arg(fixture(model));
        refused(command.arg("--ids").arg(&file).arg("--out").arg(&out), b"", 1, part, quick);
        assert!(!out.exists());
    }
}
