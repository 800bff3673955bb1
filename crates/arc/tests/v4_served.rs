//! DeepSeek-V4 from file to client: the tiny checkpoint with the release's tokenizer, the real server, the OpenAI client. Weights
//! are random, so it is what holds of any text that is looked at.
#![forbid(unsafe_code)]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Server, model, python};
use serde_json::{Value, json};

/// Rows of a vocabulary, and where they begin in the release's.
const VOCAB: usize = 129_280;

/// The tiny checkpoint with so many rows in every table that has one for each token, which repeat.
fn with_whole_vocabulary(from: &Path, to: &Path) {
    let file = fs::read(from.join("model.safetensors")).expect("a committed fixture");
    let header_len = u64::from_le_bytes(file[..8].try_into().expect("eight bytes")) as usize;
    let header: serde_json::Map<String, Value> = serde_json::from_slice(&file[8..8 + header_len]).expect("a header");
    let data = &file[8 + header_len..];
    let (mut out, mut entries, mut tiled) = (Vec::new(), serde_json::Map::new(), 0);
    for (name, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let at = |i: usize| entry["data_offsets"][i].as_u64().expect("an offset") as usize;
        let (bytes, mut entry, begin) = (&data[at(0)..at(1)], entry.clone(), out.len());
        let rows = entry["shape"][0].as_u64().unwrap_or(1) as usize;
        if ["embed.weight", "head.weight"].contains(&name.as_str()) || name.ends_with("tid2eid") {
            let row = bytes.len() / rows;
            out.extend(bytes.iter().cycle().take(VOCAB * row));
            entry["shape"][0] = json!(VOCAB);
            tiled += 1;
        } else {
            out.extend_from_slice(bytes);
        }
        entry["data_offsets"] = json!([begin, out.len()]);
        entries.insert(name.clone(), entry);
    }
    assert_eq!(tiled, 4, "embedding, head and two tables of experts");
    let header = Value::Object(entries).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &out].concat();
    fs::write(to.join("model.safetensors"), file).expect("a temporary folder");
    let config = fs::read_to_string(from.join("config.json")).expect("a committed fixture");
    let mut config: Value = serde_json::from_str(&config).expect("JSON");
    config["vocab_size"] = json!(VOCAB);
    fs::write(to.join("config.json"), config.to_string()).expect("a temporary folder");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(model(&format!("deepseek-v4/{file}")), to.join(file)).expect("a temporary folder");
    }
}

#[test]
fn the_openai_client_is_served_v4() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let checkpoint: PathBuf = folder.path().join("v4-tiny");
    fs::create_dir(&checkpoint).expect("a temporary folder");
    with_whole_vocabulary(&root.join("../../tests/fixtures/deepseek-v4-tiny/native"), &checkpoint);
    let server = Server::start(&checkpoint, &["--slots", "8", "--context", "2048"]);
    let output = Command::new(python())
        .arg(root.join("tests/python/v4_client.py"))
        .args([format!("http://{}", server.address), checkpoint.join("tokenizer.json").to_string_lossy().into_owned()])
        .output()
        .expect("python starts");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    let n: u32 = out.trim().strip_suffix(" checks passed").and_then(|n| n.parse().ok()).expect("a count");
    assert!(n >= 30, "only {n} checks ran");
    assert_eq!(server.metric("arc_requests_running"), 0.0);
    assert!(server.metric("arc_two_part_steps_total") > 0.0 && server.metric("arc_drafts_total") > 0.0);
}
