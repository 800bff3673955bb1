//! Configurations and tensors of DeepSeek-V4 that cannot be true are refused by name, before anything runs.

mod v4;

use std::path::PathBuf;

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
