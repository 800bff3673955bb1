//! What a dense decoder's configuration comes to, and which ones are refused before anything is loaded.

mod common;

use std::path::Path;

use arc_device::format::Format;
use arc_engine::load::ModelFile;
use arc_engine::load::testing::{GgufWriter, safetensors_bytes};
use arc_engine::model::config::DecoderConfig;
use common::Folder;

const HIDDEN: usize = 64;

/// A value of GGUF metadata.
#[derive(Clone, Copy)]
enum Entry {
    Size(u32),
    Float(f32),
}

/// Reads the configuration of a GGUF file of `arch` whose metadata under its prefix is a small good model's, with
/// `changes` on top.
fn gguf(folder: &Folder, arch: &str, changes: &[(&str, Entry)]) -> Result<DecoderConfig, String> {
    use Entry::{Float, Size};
    let good = [
        ("embedding_length", Size(HIDDEN as u32)),
        ("block_count", Size(2)),
        ("attention.head_count", Size(4)),
        ("attention.head_count_kv", Size(2)),
        ("attention.key_length", Size(16)),
        ("attention.value_length", Size(16)),
        ("attention.sliding_window", Size(if arch == "gemma3" { 8 } else { 0 })),
        ("attention.layer_norm_rms_epsilon", Float(1e-6)),
        ("feed_forward_length", Size(96)),
        ("context_length", Size(256)),
    ];
    let kept = good.iter().filter(|(key, _)| changes.iter().all(|(changed, _)| changed != key));
    let mut writer = GgufWriter::default().str("general.architecture", arch);
    for (key, entry) in kept.chain(changes) {
        let key = format!("{arch}.{key}");
        writer = match *entry {
            Size(value) => writer.u32(&key, value),
            Float(value) => writer.f32(&key, value),
        };
    }
    writer = writer.tensor("token_embd.weight", Format::F32, &[8, HIDDEN], vec![0; 4 * 8 * HIDDEN]);
    read(folder.write("model.gguf", writer.bytes()))
}

/// Reads the configuration of a safetensors model whose `config.json` is that of a tiny checkpoint with `changes` on top.
fn json(folder: &Folder, model: &str, changes: &[(&str, serde_json::Value)]) -> Result<DecoderConfig, String> {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny").join(model);
    let text = std::fs::read(fixture.join("config.json")).expect("the fixture is committed");
    let mut config: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    changes.iter().for_each(|(name, value)| config[*name] = value.clone());
    folder.write("config.json", config.to_string());
    let weights = safetensors_bytes(r#"{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, &[0]);
    read(folder.write("model.safetensors", weights))
}

fn read(path: impl AsRef<Path>) -> Result<DecoderConfig, String> {
    let file = ModelFile::open(path.as_ref()).expect("the file itself is good");
    DecoderConfig::read(&file).map_err(|error| error.to_string())
}

#[test]
fn what_no_step_could_run_is_refused_before_anything_is_loaded() {
    let folder = Folder::new("decoder-config-limits");
    let heads = |n, kv| [("attention.head_count", Entry::Size(n)), ("attention.head_count_kv", Entry::Size(kv))];
    gguf(&folder, "llama", &heads(64, 1)).expect("64 query heads may share a key head");
    let error = gguf(&folder, "llama", &heads(65, 1)).expect_err("and no more");
    assert!(error.contains("head count is 65, more than 64 for each of the 1 key heads"), "{error}");
    let length = [("attention.key_length", Entry::Size(257)), ("attention.value_length", Entry::Size(257))];
    let error = gguf(&folder, "llama", &length).expect_err("a head that is too long");
    assert!(error.contains("head length is 257"), "{error}");
}

#[test]
fn a_softcap_that_divides_by_nothing_is_refused() {
    let folder = Folder::new("decoder-config-softcap");
    let cap = |value| gguf(&folder, "gemma3", &[("final_logit_softcapping", Entry::Float(value))]);
    assert_eq!(cap(30.0).expect("Gemma 2's").softcap, Some(30.0));
    for value in [0.0, -30.0, f32::INFINITY, f32::NAN] {
        let error = cap(value).expect_err("every logit would be NaN");
        assert!(error.contains("final logit softcapping must be finite and above 0"), "{value}: {error}");
    }
}

/// GGUF does not say what the configuration of transformers calls `query_pre_attn_scalar`: 168 for 27B, the length of a
/// head for all others.
#[test]
fn gemma3_27b_scales_its_scores_by_hidden_size_over_heads() {
    let folder = Folder::new("decoder-config-scale");
    let scale = |arch, layers, heads| {
        let changes = [("block_count", Entry::Size(layers)), ("attention.head_count", Entry::Size(heads))];
        gguf(&folder, arch, &changes).expect("a good configuration").attn_scale
    };
    assert_eq!(scale("gemma3", 62, 8), 1.0 / (HIDDEN as f32 / 8.0).sqrt());
    assert_eq!(scale("gemma3", 48, 8), 0.25);
    assert_eq!(scale("llama", 62, 8), 0.25);
}

/// transformers 4 has `rope_theta`, `rope_scaling` and `rope_local_base_freq`; transformers 5 writes `rope_parameters`,
/// for Gemma 3 by kind of layer.
#[test]
fn old_and_new_rope_fields_mean_the_same() {
    let folder = Folder::new("decoder-config-rope");
    let absent = serde_json::Value::Null;
    let old = [
        ("rope_theta", serde_json::json!(2e6)),
        ("rope_scaling", serde_json::json!({ "rope_type": "linear", "factor": 8.0 })),
        ("rope_local_base_freq", serde_json::json!(3e4)),
    ];
    let new = serde_json::json!({
        "full_attention": { "rope_type": "linear", "factor": 8.0, "rope_theta": 2e6 },
        "sliding_attention": { "rope_type": "default", "rope_theta": 3e4 },
    });
    let new = [("rope_theta", absent.clone()), ("rope_local_base_freq", absent.clone()), ("rope_parameters", new)];
    let old = json(&folder, "gemma3", &old).expect("a good configuration");
    assert_eq!(
        old.rope_tables.iter().map(|table| (table.base, table.scale)).collect::<Vec<_>>(),
        [(2e6, 8.0), (3e4, 1.0)]
    );
    assert_eq!(json(&folder, "gemma3", &new).expect("a good configuration"), old);
    let new = [
        ("rope_theta", absent),
        ("rope_parameters", serde_json::json!({ "rope_type": "linear", "factor": 4.0, "rope_theta": 5e5 })),
    ];
    let llama = json(&folder, "llama", &new).expect("a good configuration");
    assert_eq!(llama.rope_tables.iter().map(|table| (table.base, table.scale)).collect::<Vec<_>>(), [(5e5, 4.0)]);
    let strange = [("rope_scaling", serde_json::json!({ "rope_type": "yarn", "factor": 4.0 }))];
    let error = json(&folder, "llama", &strange).expect_err("yarn is not supported");
    assert!(error.contains("\"yarn\""), "{error}");
}

#[test]
fn arithmetic_that_is_not_ours_is_refused_by_name() {
    let folder = Folder::new("decoder-config-other");
    let cases = [
        ("llama", "hidden_act", serde_json::json!("gelu"), r#"hidden_act" should be silu, but is "gelu""#),
        ("llama", "hidden_act", serde_json::json!(7), "should be silu, but is 7"),
        ("gemma3", "hidden_activation", serde_json::json!("relu"), "should be gelu_pytorch_tanh"),
        ("gemma3", "attn_logit_softcapping", serde_json::json!(50.0), "attn_logit_softcapping is not supported"),
        ("llama", "attention_bias", serde_json::json!(true), "attention_bias is not supported"),
    ];
    for (model, name, value, part) in cases {
        json(&folder, model, &[(name, serde_json::Value::Null)]).expect("nothing said is the usual");
        let error = json(&folder, model, &[(name, value)]).expect_err(name);
        assert!(error.contains(part), "{name}: {error}");
    }
}
