//! Models that lie, given to the real binary: one sentence, a non-zero exit, quickly and in 64 MiB.
//!
//! Each case is a small good model with one thing changed, so nothing else can be what is refused.

mod common;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use common::{arc, output_with, refused};

/// The promise is 100 ms; a loaded test machine gets ten times that.
const QUICK: Duration = Duration::from_secs(1);

fn tiny(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny").join(name)
}

/// The binary with at most 64 MiB of data, in kB; mapped files do not count.
fn limited(command: &str, model: &Path) -> Command {
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -d 65536; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_arc"), command]).arg(model);
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("ARC_")) {
        limited.env_remove(name);
    }
    limited.env("HOME", "/nonexistent");
    if command == "run" {
        limited.args(["--raw", "--threads", "1", "-n", "1", "hello"]);
    }
    limited
}

/// A GGUF file to be changed in place.
struct Gguf(Vec<u8>);

impl Gguf {
    fn good() -> Gguf {
        Gguf(fs::read(tiny("llama/model.gguf")).expect("the fixture is committed"))
    }

    /// Where `what` begins, counted from its end if `after`.
    fn find(&self, what: &[u8]) -> usize {
        self.0.windows(what.len()).position(|w| w == what).unwrap_or_else(|| panic!("{what:?} is in the file"))
    }

    /// Replaces the first `from` by `to`, which has its length.
    fn replace(mut self, from: &str, to: &str) -> Gguf {
        assert_eq!(from.len(), to.len());
        let at = self.find(from.as_bytes());
        self.0[at..at + to.len()].copy_from_slice(to.as_bytes());
        self
    }

    /// Writes `bytes` at `offset` behind the first `key`.
    fn poke(mut self, key: &str, offset: usize, bytes: &[u8]) -> Gguf {
        let at = self.find(key.as_bytes()) + key.len() + offset;
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }
}

#[test]
fn lying_gguf_files_are_refused() {
    let q = "blk.0.attn_q.weight";
    // Behind a tensor's name: n_dims u32, two dims u64, type u32, offset u64.
    let (n_dims, dim0, type_code, offset) = (0, 4, 20, 24);
    let huge = u64::MAX.to_le_bytes();
    let cases: Vec<(&str, Gguf, &str)> = vec![
        ("magic", Gguf(b"GGUX".iter().copied().chain(Gguf::good().0[4..].to_vec()).collect()), "GG"),
        ("version", Gguf::good().poke("GGUF", 0, &9_u32.to_le_bytes()), "version"),
        ("no tensors", Gguf::good().poke("GGUF", 4, &0_u64.to_le_bytes()), "tensor"),
        ("endless tensors", Gguf::good().poke("GGUF", 4, &huge), "tensor"),
        ("endless metadata", Gguf::good().poke("GGUF", 12, &huge), "metadata"),
        ("architecture", Gguf::good().poke("general.architecture", 12, b"lorem"), "lorem"),
        ("endless string", Gguf::good().poke("general.architecture", 4, &huge), ""),
        ("string over the end", Gguf::good().poke("general.architecture", 4, &(1_u64 << 40).to_le_bytes()), ""),
        ("value type", Gguf::good().poke("general.architecture", 0, &77_u32.to_le_bytes()), "77"),
        ("invalid UTF-8", Gguf::good().poke("general.architecture", 12, b"\xff\xfe\xfd\xfc\xfb"), "UTF-8"),
        ("missing metadata", Gguf::good().replace("llama.block_count", "llama.blocks_here"), "llama.block_count"),
        ("no layers", Gguf::good().poke("llama.block_count", 4, &0_u32.to_le_bytes()), "block count"),
        ("endless layers", Gguf::good().poke("llama.block_count", 4, &u32::MAX.to_le_bytes()), ""),
        ("wrong metadata type", Gguf::good().poke("llama.block_count", 0, &6_u32.to_le_bytes()), "llama.block_count"),
        ("missing tensor", Gguf::good().replace(q, "blk.0.attn_z.weight"), q),
        ("tensor twice", Gguf::good().replace("blk.0.attn_k.weight", q), q),
        ("n_dims", Gguf::good().poke(q, n_dims, &99_u32.to_le_bytes()), q),
        ("dimension 0", Gguf::good().poke(q, dim0, &0_u64.to_le_bytes()), q),
        ("overflowing dimension", Gguf::good().poke(q, dim0, &(1_u64 << 63).to_le_bytes()), q),
        ("other dimension", Gguf::good().poke(q, dim0, &32_u64.to_le_bytes()), q),
        ("unknown tensor type", Gguf::good().poke(q, type_code, &200_u32.to_le_bytes()), "200"),
        ("offset past the end", Gguf::good().poke(q, offset, &(1_u64 << 40).to_le_bytes()), q),
        ("offset off the grid", Gguf::good().poke(q, offset, &3_u64.to_le_bytes()), q),
        ("endless array", Gguf::good().poke("tokenizer.ggml.merges", 8, &huge), ""),
        ("merge of no tokens", Gguf::good().poke("tokenizer.ggml.merges", 24, "\u{1}\u{1} t".as_bytes()), "merge"),
        ("merge without a space", Gguf::good().poke("tokenizer.ggml.merges", 24, b"tttt"), "merge"),
        ("bos outside", Gguf::good().poke("tokenizer.ggml.bos_token_id", 4, &u32::MAX.to_le_bytes()), "bos"),
        ("unknown tokenizer", Gguf::good().poke("tokenizer.ggml.model", 12, b"gptX"), "gptX"),
        (
            "no tokenizer",
            Gguf::good().replace("tokenizer.ggml.tokens", "tokenizer.ggml.tokenz"),
            "tokenizer.ggml.tokens",
        ),
    ];
    let dir = tempfile::tempdir().expect("a temporary folder");
    let n = cases.len();
    for (name, file, part) in cases {
        let path = dir.path().join(format!("{}.gguf", name.replace(' ', "-")));
        fs::write(&path, file.0).expect("the temporary folder is writable");
        for command in ["run", "inspect"] {
            refused(&mut limited(command, &path), b"", 1, part, QUICK);
        }
    }
    assert!(n > 25);
}

#[test]
fn cut_files_and_missing_parts_are_refused() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let whole = Gguf::good().0;
    for len in [0, 3, 4, 23, 24, 1000, whole.len() / 2, whole.len() - 1] {
        let path = dir.path().join(format!("{len}.gguf"));
        fs::write(&path, &whole[..len]).expect("the temporary folder is writable");
        refused(&mut limited("run", &path), b"", 1, "", QUICK);
    }
    // Safetensors in two shards, of which one is missing; then a tokenizer is.
    let copy = |files: &[&str]| {
        let folder = dir.path().join(format!("qwen2-{}", files.len()));
        fs::create_dir(&folder).expect("the temporary folder is writable");
        for file in files {
            fs::copy(tiny("qwen2").join(file), folder.join(file)).expect("the fixture is committed");
        }
        folder
    };
    let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let folder = copy(&["config.json", "tokenizer.json", "model.safetensors.index.json", shards[0]]);
    refused(&mut limited("run", &folder), b"", 1, shards[1], QUICK);
    let folder = copy(&["config.json", "model.safetensors.index.json", shards[0], shards[1], "tokenizer_config.json"]);
    refused(&mut limited("run", &folder), b"", 1, "tokenizer.json", QUICK);
}

/// The same weights as GGUF and as safetensors give the same text, in every architecture.
///
/// The GGUF files name pre-tokenizers of real models; the JSON beside the safetensors is brought to say the same.
#[test]
fn both_kinds_of_files_run_and_agree() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for name in ["llama", "qwen2", "qwen3", "gemma3"] {
        let folder = safetensors_copy(dir.path(), name);
        let text = |path: &Path| {
            let args = ["--raw", "--temp", "0", "-n", "8", "hello"];
            let output = output_with(arc().arg("run").arg(path).args(args), b"");
            assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
            output.stdout
        };
        let (folder, gguf) = (text(&folder), text(&tiny(name).join("model.gguf")));
        assert_eq!(String::from_utf8_lossy(&folder), String::from_utf8_lossy(&gguf), "{name}");
    }
}

/// A copy of a tiny model's folder whose tokenizer.json names a pre-tokenizer that Arc knows.
fn safetensors_copy(dir: &Path, name: &str) -> PathBuf {
    let folder = dir.join(name);
    fs::create_dir(&folder).expect("the temporary folder is writable");
    for entry in fs::read_dir(tiny(name)).expect("the fixture is committed").flatten() {
        fs::copy(entry.path(), folder.join(entry.file_name())).expect("the fixture is committed");
    }
    let tokenizer = folder.join("tokenizer.json");
    let mut json: serde_json::Value =
        serde_json::from_slice(&fs::read(&tokenizer).expect("the fixture is committed")).expect("it is JSON");
    if name.starts_with("qwen") {
        json["normalizer"] = serde_json::json!({"type": "NFC"});
    } else {
        json["model"]["ignore_merges"] = true.into();
    }
    fs::write(&tokenizer, json.to_string()).expect("the temporary folder is writable");
    folder
}

/// Names of a file can be anything.
#[test]
fn inspect_shows_no_control_characters() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("m.gguf");
    let file = Gguf::good().replace("general.name", "general.na\x1bm");
    fs::write(&path, &file.0).expect("the temporary folder is writable");
    let output = arc().arg("inspect").arg(&path).output().expect("the binary is built");
    let page = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(output.status.success() && page.contains("general.na\\u{1b}m") && !page.contains('\x1b'), "{page}");
}

/// Nobody may ever write to it.
#[test]
fn a_pipe_in_the_place_of_a_file_is_refused() {
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let folder = safetensors_copy(dir.path(), "llama");
        let pipe = folder.join(name);
        fs::remove_file(&pipe).expect("the fixture has it");
        assert!(Command::new("mkfifo").arg(&pipe).status().expect("coreutils").success());
        refused(arc().arg("run").arg(&folder).arg("x"), b"", 1, "not a regular file", Duration::from_secs(5));
    }
}

/// Comparing two lists that share their halves 64 levels deep takes for ever and no fuel.
#[test]
fn a_template_that_never_ends_is_refused_before_serving() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let folder = safetensors_copy(dir.path(), "llama");
    let doublings =
        |name: &str| format!("{{% set {name} = [1] %}}") + &format!("{{% set {name} = [{name}, {name}] %}}").repeat(64);
    let template = doublings("x") + &doublings("y") + "{{ x == y }}";
    let config = folder.join("tokenizer_config.json");
    let mut json: serde_json::Value =
        serde_json::from_slice(&fs::read(&config).expect("the fixture is committed")).expect("it is JSON");
    json["chat_template"] = template.into();
    fs::write(&config, json.to_string()).expect("the temporary folder is writable");
    for command in ["run", "serve"] {
        let mut arc = arc();
        arc.arg(command).arg(&folder);
        refused(&mut arc, b"hello", 1, "does not end", Duration::from_secs(20));
    }
}
