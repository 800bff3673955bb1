//! Configurations and tensors of DeepSeek-V4 that cannot be true are refused by name, before anything runs.

mod v4;

use std::path::{Path, PathBuf};

use arc_device::Alloc;
use arc_device::cpu::Cpu;
use arc_device::ops_v4::OpsV4;
use arc_device::trace::Trace;
use arc_engine::load::ModelFile;
use arc_engine::model::deepseek_v4::{Numerics, V4Config};
use arc_engine::model::{Model, ModelConfig, Plan};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use serde_json::{Value, json};
use v4::{limits, native};

type Tensors = Vec<(String, Dtype, Vec<usize>, Vec<u8>)>;

/// A copy of the fixture with changes; the folder goes with it.
struct Variant(PathBuf);

impl Drop for Variant {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).expect("the folder is the test's own");
    }
}

impl Variant {
    fn new(name: &str, config: &dyn Fn(&mut Value), tensors: Option<&dyn Fn(&mut Tensors)>) -> Variant {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("v4-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let text = std::fs::read(native().join("config.json")).expect("the fixture is committed");
        let mut fields: Value = serde_json::from_slice(&text).expect("JSON");
        config(&mut fields);
        std::fs::write(folder.join("config.json"), fields.to_string()).expect("written");
        let (from, to) = (native().join("model.safetensors"), folder.join("model.safetensors"));
        let Some(change) = tensors else {
            std::fs::copy(from, to).expect("copied");
            return Variant(folder);
        };
        let bytes = std::fs::read(from).expect("the fixture is committed");
        let mut all: Tensors = SafeTensors::deserialize(&bytes)
            .expect("whole")
            .tensors()
            .into_iter()
            .map(|(name, tensor)| (name, tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec()))
            .collect();
        change(&mut all);
        let views = all.iter().map(|(name, dtype, shape, data)| {
            (name, TensorView::new(*dtype, shape.clone(), data).expect("bytes of the shape"))
        });
        std::fs::write(to, serialize(views, None).expect("serialises")).expect("written");
        Variant(folder)
    }

    /// Loads it on a device.
    fn problem(&self) -> String {
        self.problem_on(&mut Cpu::new(1, limits()))
    }

    /// Plans it: names, types and shapes are checked, values are not looked at.
    fn problem_on_paper(&self) -> String {
        self.problem_on(&mut Trace::new(limits(), 64))
    }

    fn problem_on<D: OpsV4 + Alloc>(&self, dev: &mut D) -> String {
        let file = ModelFile::open(&self.0).expect("the container is sound");
        let mut load = || {
            let mut config = ModelConfig::read(&file)?;
            if let ModelConfig::DeepseekV4(config) = &mut config {
                config.set_numerics(Numerics::Reference);
            }
            Model::load(dev, &file, &config, &limits())
        };
        match load() {
            Ok(_) => "nothing".to_owned(),
            Err(error) => error.to_string(),
        }
    }
}

#[test]
fn a_configuration_is_refused_by_the_name_of_its_field() {
    let cases: &[(&str, Value, &str)] = &[
        ("none", json!(null), "nothing"),
        ("scoring_func", json!("softmax"), "scoring_func"),
        ("hc_mult", json!(2), "hc_mult"),
        ("num_key_value_heads", json!(4), "num_key_value_heads"),
        ("n_shared_experts", json!(2), "n_shared_experts"),
        ("compress_ratios", json!(null), "compress_ratios"),
        ("compress_ratios", json!([0, 4, 128]), "compress_ratios"),
        ("compress_ratios", json!([0, 4, 64, 4, 0]), "compress_ratios"),
        ("compress_ratios", json!([4, 4, 128, 4, 0]), "layers.0.attn.compressor.wkv"),
        ("compress_ratios", json!([0, 0, 128, 4, 0]), "layers.1.attn.compressor.ape"),
        ("compress_ratios", json!([0, 128, 128, 4, 0]), "layers.1.attn.indexer.wq_b"),
        ("compress_ratios", json!([0, 4, 4, 4, 0]), "layers.2.attn.compressor"),
        ("compress_ratios", json!([0, 4, 128, 4, 0, 0, 0]), "nothing"),
        ("num_hash_layers", json!(1), "layers.1.ffn.gate.tid2eid"),
        ("num_hash_layers", json!(3), "layers.2.ffn.gate.tid2eid"),
        ("num_hash_layers", json!(9), "num_hash_layers"),
        ("index_topk", json!(0), "index_topk"),
        ("index_topk", json!(100_000), "index_topk"),
        ("index_n_heads", json!(7), "index_n_heads"),
        ("head_dim", json!(1024), "head_dim"),
        ("head_dim", json!(96), "head_dim"),
        ("o_groups", json!(3), "o_groups"),
        ("n_routed_experts", json!(5), "layers.0.ffn.gate."),
        ("n_routed_experts", json!(7), "layers.0.ffn.experts.6"),
        ("n_routed_experts", json!(4_000_000_000u32), "n_routed_experts"),
        ("num_experts_per_tok", json!(7), "num_experts_per_tok"),
        ("swiglu_limit", json!(-1.0), "swiglu_limit"),
        ("rms_norm_eps", json!(1e300), "rms_norm_eps"),
        ("compress_rope_theta", json!(0.5), "compress_rope_theta"),
        ("rope_scaling", json!({"type": "linear", "factor": 2}), "rope_scaling"),
        ("rope_scaling", json!({"type": "yarn", "factor": 0.1}), "rope_scaling.factor"),
        ("hidden_size", json!(256), "embed.weight"),
        ("vocab_size", json!(512), "embed.weight"),
        ("model_type", json!("deepseek_v9"), "deepseek_v4"),
    ];
    for (i, (field, value, want)) in cases.iter().enumerate() {
        let set = |fields: &mut Value| fields[*field] = value.clone();
        let variant = Variant::new(&format!("config-{i}"), &set, None);
        for found in [variant.problem(), variant.problem_on_paper()] {
            assert!(found.contains(want), "{field} = {value}: {found}, should name {want}");
        }
    }
}

/// The fixture in three shards, a matrix and its scales in different ones, is the fixture; and shards that are not whole, or
/// not what the index says, are refused by the name of the file or tensor.
#[test]
fn shards_are_one_model_or_none() {
    let sharded = |name: &str, change: &dyn Fn(&Path, &mut serde_json::Map<String, Value>)| -> Variant {
        let variant = Variant::new(name, &|_| {}, None);
        let whole = variant.0.join("model.safetensors");
        let bytes = std::fs::read(&whole).expect("the copy");
        std::fs::remove_file(whole).expect("it was copied");
        let tensors = SafeTensors::deserialize(&bytes).expect("whole");
        let mut all = tensors.tensors();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        let mut map = serde_json::Map::new();
        for shard in 0..3 {
            let file = format!("model-{shard}.safetensors");
            let part: Vec<_> = all.iter().skip(shard).step_by(3).map(|(name, view)| (name.clone(), view)).collect();
            map.extend(part.iter().map(|(name, _)| (name.clone(), json!(file))));
            std::fs::write(variant.0.join(&file), serialize(part, None).expect("serialises")).expect("written");
        }
        let apart = |name: &str| map[&format!("{name}.weight")] != map[&format!("{name}.scale")];
        assert!(apart("layers.2.attn.wq_b") && apart("layers.3.ffn.experts.4.w1"));
        change(&variant.0, &mut map);
        let index = json!({"metadata": {}, "weight_map": map}).to_string();
        std::fs::write(variant.0.join("model.safetensors.index.json"), index).expect("written");
        variant
    };
    let good = sharded("shards", &|_, _| {});
    let ids = v4::Golden::open("golden.safetensors").ids("short.input_ids");
    let logits = |folder: &Path| v4::Rig::load(folder, Numerics::Reference, 1).prompt(0, &ids, ids.len());
    assert_eq!(v4::same_bits(&logits(&good.0), &logits(&native()), "shards"), ids.len() * v4::VOCAB);
    let cut = |folder: &Path, by: usize| {
        let path = folder.join("model-1.safetensors");
        let bytes = std::fs::read(&path).expect("written before");
        std::fs::write(path, &bytes[..bytes.len() - by]).expect("written");
    };
    type Change<'a> = &'a dyn Fn(&Path, &mut serde_json::Map<String, Value>);
    let cases: [(&str, Change<'_>, &str); 7] = [
        ("short", &|folder, _| cut(folder, 1), "model-1.safetensors"),
        ("header-only", &|folder, _| cut(folder, 100_000), "model-1.safetensors"),
        (
            "missing",
            &|folder, _| std::fs::remove_file(folder.join("model-2.safetensors")).expect("written before"),
            "model-2.safetensors",
        ),
        (
            "listed",
            &|_, map| drop(map.insert("layers.9.attn_norm.weight".into(), json!("model-0.safetensors"))),
            "layers.9.attn_norm.weight",
        ),
        ("unlisted", &|_, map| drop(map.remove("layers.0.attn_norm.weight")), "layers.0.attn_norm.weight"),
        ("elsewhere", &|_, map| drop(map.insert("norm.weight".into(), json!("../model.safetensors"))), "../model"),
        (
            "other-shard",
            &|_, map| {
                let file = if map["norm.weight"] == "model-0.safetensors" { "model-1" } else { "model-0" };
                map.insert("norm.weight".into(), json!(format!("{file}.safetensors")));
            },
            "norm.weight",
        ),
    ];
    for (name, change, want) in cases {
        let folder = sharded(&format!("shards-{name}"), change);
        let error = ModelFile::open(&folder.0).expect_err(name).to_string();
        assert!(error.contains(want), "{name}: {error}");
    }
}

/// V4-Flash-0731 has other blocks behind its trunk, and three ratios for them: the trunk loads, and it is known for what it
/// is.
#[test]
fn the_release_of_july_is_known_by_its_draft_blocks() {
    let set = |fields: &mut Value| {
        fields["compress_ratios"] = json!([0, 4, 128, 4, 0, 0, 0]);
        fields["dspark_block_size"] = json!(5);
        fields["dspark_target_layer_ids"] = json!([1, 2, 3]);
    };
    let rename = |all: &mut Tensors| {
        all.retain(|tensor| !tensor.0.starts_with("mtp.0.e_proj") && !tensor.0.starts_with("mtp.0.h_proj"));
        all.push(("mtp.0.main_proj.weight".into(), Dtype::F32, vec![1, 2], vec![0; 8]));
    };
    let july = Variant::new("july", &set, Some(&rename));
    assert_eq!(july.problem(), "nothing");
    for (folder, block_drafts) in [(&july.0, true), (&native(), false)] {
        let file = ModelFile::open(folder).expect("the container is sound");
        let Ok(ModelConfig::DeepseekV4(config)) = ModelConfig::read(&file) else { panic!("a DeepSeek-V4") };
        assert_eq!((config.block_drafts, config.layers.len()), (block_drafts, 4));
    }
}

fn find<'a>(all: &'a mut Tensors, name: &str) -> &'a mut (String, Dtype, Vec<usize>, Vec<u8>) {
    all.iter_mut().find(|tensor| tensor.0 == name).expect(name)
}

#[test]
fn a_tensor_is_refused_by_its_name() {
    let q_b = "layers.2.attn.wq_b";
    let w1 = "layers.3.ffn.experts.4.w1";
    type Case = (&'static str, Box<dyn Fn(&mut Tensors)>, String);
    let cases: Vec<Case> = vec![
        ("scale-nan", Box::new(move |all| find(all, &format!("{q_b}.scale")).3[2] = 255), q_b.to_owned()),
        ("fp4-scale-far", Box::new(move |all| find(all, &format!("{w1}.scale")).3[1] = 254), w1.to_owned()),
        ("code-nan", Box::new(move |all| find(all, &format!("{q_b}.weight")).3[9] = 0x7f), q_b.to_owned()),
        ("fp4-scale-nan", Box::new(move |all| find(all, &format!("{w1}.scale")).3[5] = 255), w1.to_owned()),
        ("scale-shape", Box::new(move |all| find(all, &format!("{q_b}.scale")).2 = vec![2, 2]), format!("{q_b}.scale")),
        (
            "fp4-scale-shape",
            Box::new(move |all| find(all, &format!("{w1}.scale")).2 = vec![64, 8]),
            format!("{w1}.scale"),
        ),
        ("scale-type", Box::new(move |all| find(all, &format!("{q_b}.scale")).1 = Dtype::U8), format!("{q_b}.scale")),
        ("scale-absent", Box::new(move |all| all.retain(|t| t.0 != format!("{q_b}.scale"))), format!("{q_b}.scale")),
        ("expert-absent", Box::new(move |all| all.retain(|t| t.0 != format!("{w1}.weight"))), w1.to_owned()),
        (
            "hash",
            Box::new(|all| find(all, "layers.0.ffn.gate.tid2eid").3[0] = 6),
            "layers.0.ffn.gate.tid2eid".to_owned(),
        ),
        (
            "hash-negative",
            Box::new(|all| find(all, "layers.1.ffn.gate.tid2eid").3[..8].fill(255)),
            "layers.1.ffn.gate.tid2eid".to_owned(),
        ),
    ];
    assert_eq!(cases.len(), 11);
    for (name, change, want) in cases {
        let variant = Variant::new(name, &|_| {}, Some(&*change));
        let found = variant.problem();
        assert!(found.contains(&want), "{name}: {found}, should name {want}");
        let of_values = ["scale-nan", "fp4-scale-far", "code-nan", "fp4-scale-nan", "hash", "hash-negative"];
        let on_paper = variant.problem_on_paper();
        assert_eq!(on_paper, if of_values.contains(&name) { "nothing".to_owned() } else { found }, "{name}");
    }
}

/// Memory table and stages of a released folder, and of the same model as BF16, come from headers: not one byte of a tensor
/// is handed out, while loading takes them all. What both say of matrices is the same.
#[test]
fn a_plan_reads_headers_only() {
    let bf16 = v4::bf16();
    for folder in [native(), bf16.clone()] {
        for numerics in Numerics::ALL {
            let file = ModelFile::open(&folder).expect("the fixture opens");
            let ModelFile::Safetensors(opened) = &file else { panic!("a folder of safetensors") };
            let mut config = ModelConfig::read(&file).expect("a configuration");
            let ModelConfig::DeepseekV4(v4) = &mut config else { panic!("a DeepSeek-V4") };
            v4.set_numerics(numerics);
            v4.draft = folder == native();
            let plan = Plan::new(&file, &config, &limits(), 1, 64).expect("it can be planned");
            assert_eq!(opened.weights().bytes_read(), 0, "{}", numerics.name());
            let mut dev = Cpu::new(1, limits());
            Model::load(&mut dev, &file, &config, &limits()).expect("it can be loaded");
            let bytes: usize = opened.weights().tensors().iter().map(|tensor| tensor.range.len()).sum();
            assert!(opened.weights().bytes_read() >= bytes as u64 * 9 / 10, "of {bytes}");
            let weights: u64 = plan.decode_step.iter().map(|stage| stage.weight_bytes).sum();
            assert!(weights > bytes as u64 / 10 && plan.memory.total_bytes() > bytes as u64, "{weights} of {bytes}");
        }
    }
    std::fs::remove_dir_all(&bf16).expect("the folder is the test's own");
}

/// Stored rows and rounded inputs come in blocks, which not every size is made of.
#[test]
fn numerics_refuse_sizes_that_they_cannot_block() {
    let file = ModelFile::open(&native()).expect("the fixture opens");
    let config = || match ModelConfig::read(&file) {
        Ok(ModelConfig::DeepseekV4(config)) => config,
        other => panic!("{other:?}"),
    };
    assert_eq!(config().numerics(), Numerics::Serving, "what is not asked for");
    let problem = |change: fn(&mut V4Config), numerics: Numerics| {
        let mut config = config();
        config.set_numerics(numerics);
        change(&mut config);
        let config = ModelConfig::DeepseekV4(config);
        Model::load(&mut Trace::new(limits(), 64), &file, &config, &limits()).err().map(|error| error.to_string())
    };
    for numerics in Numerics::ALL {
        assert_eq!(Numerics::from_name(numerics.name()), Some(numerics));
        assert_eq!(problem(|_| {}, numerics), None, "{numerics:?}");
        let found = problem(|config| config.index.dim = 64, numerics).expect("another shape than the tensors'");
        assert_eq!(found.contains("index_head_dim"), numerics != Numerics::Reference, "{numerics:?}: {found}");
    }
    let full = problem(|config| config.q_rank = 96, Numerics::Simulated { fp8_inputs: true });
    assert!(full.is_some_and(|full| full.contains("q_lora_rank")));
    assert_eq!(Numerics::from_name("bf16"), None);
}
