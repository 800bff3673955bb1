//! DeepSeek-V4 from GGUF: the fixture's weights under GGUF's names, and the 2-bit recipe with random weights.

mod v4;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use arc_device::cpu::Cpu;
use arc_device::format::{Format, repack};
use arc_engine::load::gguf::ValueType;
use arc_engine::load::synthetic::table::GgufNames;
use arc_engine::load::synthetic::{Synthetic, V4Sizes};
use arc_engine::load::testing::{GgufWriter, TensorSpec, array};
use arc_engine::load::{LoadError, ModelFile};
use arc_engine::model::deepseek_v4::{Numerics, Report};
use arc_engine::model::{Model, ModelConfig};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use v4::{Golden, Rig, VOCAB, dequantised, draft_logits, fixture_sizes, limits, load_with, native, same_bits};

/// A file that goes with its test.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).expect("the file is the test's own");
    }
}

fn written(name: &str, writer: &GgufWriter) -> Temporary {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("v4-{name}-{}.gguf", std::process::id()));
    std::fs::write(&path, writer.bytes()).expect("written");
    Temporary(path)
}

/// Metadata of a model of these sizes.
fn metadata(s: &V4Sizes) -> GgufWriter {
    let sizes = [
        ("block_count", s.n_layers()),
        ("context_length", s.context),
        ("embedding_length", s.hidden),
        ("vocab_size", s.vocab),
        ("attention.head_count", s.n_heads),
        ("attention.head_count_kv", 1),
        ("attention.key_length", s.head_dim),
        ("attention.value_length", s.head_dim),
        ("attention.q_lora_rank", s.q_rank),
        ("attention.output_lora_rank", s.o_rank),
        ("attention.output_group_count", s.o_groups),
        ("attention.sliding_window", s.window),
        ("attention.indexer.head_count", s.index_heads),
        ("attention.indexer.key_length", s.index_dim),
        ("attention.indexer.top_k", s.index_top),
        ("rope.dimension_count", s.rope_dim),
        ("rope.scaling.original_context_length", 65_536),
        ("expert_count", s.n_experts),
        ("expert_used_count", s.experts_per_token),
        ("expert_shared_count", 1),
        ("expert_feed_forward_length", s.expert_dim),
        ("hash_layer_count", s.n_hash_layers),
        ("hyper_connection.count", s.streams),
        ("hyper_connection.sinkhorn_iterations", 20),
    ];
    let floats = [
        ("attention.compress_rope_freq_base", 160_000.0),
        ("attention.layer_norm_rms_epsilon", 1e-6),
        ("rope.freq_base", 10_000.0),
        ("rope.scaling.factor", 16.0),
        ("rope.scaling.yarn_beta_fast", 32.0),
        ("rope.scaling.yarn_beta_slow", 1.0),
        ("expert_weights_scale", s.routed_scale),
        ("hyper_connection.epsilon", 1e-6),
    ];
    let mut writer = GgufWriter::default().str("general.architecture", "deepseek4");
    writer = writer.str("deepseek4.rope.scaling.type", "yarn");
    for (name, value) in sizes {
        writer = writer.u32(&format!("deepseek4.{name}"), value as u32);
    }
    for (name, value) in floats {
        writer = writer.f32(&format!("deepseek4.{name}"), value);
    }
    let ratios: Vec<u8> = s.ratios.iter().flat_map(|&ratio| (ratio as i32).to_le_bytes()).collect();
    let ratios = array(ValueType::I32, s.ratios.len() as u64, &ratios);
    let clamps: Vec<u8> = (0..s.n_layers()).flat_map(|_| s.swiglu_limit.to_le_bytes()).collect();
    let clamps = array(ValueType::F32, s.n_layers() as u64, &clamps);
    writer
        .value("deepseek4.attention.compress_ratios", ValueType::Array, ratios)
        .value("deepseek4.swiglu_clamp_exp", ValueType::Array, clamps)
        .value("deepseek4.expert_weights_norm", ValueType::Bool, [1])
}

/// 32-bit integers, which are no weight format.
fn integers(name: &str, shape: &[usize], data: Vec<u8>) -> TensorSpec {
    let dims = shape.iter().rev().map(|&dim| dim as u64).collect();
    TensorSpec { name: name.into(), dims, n_dims: None, code: 26, offset: None, data }
}

/// The fixture as GGUF: experts in MXFP4, which holds their FP4 bits, everything else as BF16 and F32.
fn fixture() -> GgufWriter {
    let (names, mut writer) = (GgufNames::default(), metadata(&fixture_sizes()));
    let bytes = std::fs::read(native().join("model.safetensors")).expect("the fixture is committed");
    let native = SafeTensors::deserialize(&bytes).expect("the fixture is whole");
    let mut experts: BTreeMap<String, BTreeMap<usize, Vec<u8>>> = BTreeMap::new();
    for (name, dtype, shape, data) in dequantised() {
        let (gguf, expert) = names.of(&name).expect(&name);
        if let Some(expert) = expert {
            let codes = native.tensor(&name).expect(&name);
            let scales = native.tensor(&name.replace(".weight", ".scale")).expect(&name);
            let rows = repack::fp4_rows(codes.data(), shape[0], shape[1], scales.data(), scales.shape());
            experts.entry(gguf).or_default().insert(expert, rows.expect("sound"));
        } else if dtype == Dtype::I64 {
            let small = |id: &[u8; 8]| (i64::from_le_bytes(*id) as i32).to_le_bytes();
            writer.tensors.push(integers(&gguf, &shape, data.as_chunks::<8>().0.iter().flat_map(small).collect()));
        } else {
            let format = if dtype == Dtype::F32 { Format::F32 } else { Format::Bf16 };
            writer = writer.tensor(&gguf, format, &shape, data);
        }
    }
    assert_eq!(experts.len(), 5 * 3, "three matrices in each of four layers and the draft block");
    for (name, parts) in experts {
        assert!(parts.keys().copied().eq(0..6), "{name}");
        writer = writer.tensor(&name, Format::Mxfp4, &[6, 128, 128], parts.into_values().flatten().collect());
    }
    writer
}

/// Names, merged experts, 32-bit tables and metadata give the function of the released folder, to the last bit.
#[test]
fn the_fixture_under_other_names_gives_the_same_bits() {
    let file = written("fixture", &fixture());
    let ids = Golden::open("golden.safetensors").ids("mid.input_ids");
    for numerics in [Numerics::Reference, Numerics::Simulated { fp8_inputs: true }] {
        let want = Rig::load(&native(), numerics, 2).prompt(0, &ids, ids.len());
        let got = Rig::load(&file.0, numerics, 2).prompt(0, &ids, ids.len());
        assert_eq!(same_bits(&got, &want, numerics.name()), 139 * VOCAB);
    }
}

/// The 2-bit recipe with random weights.
fn two_bit() -> GgufWriter {
    let model = Synthetic::open("synthetic:deepseek-v4-tiny").expect("a known name");
    let mut writer = metadata(&model.sizes);
    for tensor in model.tensors() {
        let data = model.bytes(tensor);
        writer = match tensor.format {
            Some(format) => writer.tensor(&tensor.name, format, &tensor.shape, data),
            None => {
                writer.tensors.push(integers(&tensor.name, &tensor.shape, data));
                writer
            }
        };
    }
    writer
}

/// IQ2_XXS, Q2_K, Q8_0 and F16 in one model: any chunks and threads give the same bits, and distributions are close to
/// what the same weights give as floats.
#[test]
fn the_two_bit_recipe_runs() {
    let file = written("two-bit", &two_bit());
    let ids: Vec<u32> = (0..200).map(|i| (i * 97 + 13) % VOCAB as u32).collect();
    let want = Rig::load(&file.0, Numerics::Serving, 2).prompt(0, &ids, ids.len());
    assert!(want.iter().all(|x| x.is_finite()) && want.iter().any(|x| x.abs() > 1.0));
    for (threads, chunk) in [(1, 7), (3, 1), (3, 128)] {
        let got = Rig::load(&file.0, Numerics::Serving, threads).prompt(0, &ids, chunk);
        assert_eq!(same_bits(&got, &want, &format!("chunks of {chunk} on {threads} threads")), 200 * VOCAB);
    }
    let floats = Rig::load(&file.0, Numerics::Reference, 2).prompt(0, &ids, ids.len());
    let (kl, same) = v4::divergence(&want, &floats);
    eprintln!("serving against reference: mean KL {kl:.2e}, same argmax {same:.3}");
    assert!(kl < 0.1 && same > 0.7, "{kl} {same}");
}

/// As llama.cpp writes it: the draft block is a block after the trunk's, what a layer has not stands under `nextn.`, and
/// where `join`, both projections are one tensor, side by side along the inputs.
fn counting_drafts(mut writer: GgufWriter, layers: usize, join: bool) -> GgufWriter {
    writer.metadata.retain(|(name, _)| name != b"deepseek4.block_count");
    writer = writer.u32("deepseek4.block_count", layers as u32 + 1).u32("deepseek4.nextn_predict_layers", 1);
    let mut projections = Vec::new();
    for mut tensor in std::mem::take(&mut writer.tensors) {
        let name = String::from_utf8(tensor.name.clone()).expect("UTF-8");
        let Some(rest) = name.strip_prefix("mtp.0.") else {
            writer.tensors.push(tensor);
            continue;
        };
        let own = ["e_proj.", "h_proj.", "enorm.", "hnorm.", "hc_head_"].iter().any(|own| rest.starts_with(own));
        let rest = match rest {
            "norm.weight" => "nextn.shared_head_norm.weight".to_owned(),
            _ if own => format!("nextn.{rest}"),
            _ => rest.to_owned(),
        };
        tensor.name = format!("blk.{layers}.{rest}").into_bytes();
        if join && rest.ends_with("_proj.weight") {
            projections.push(tensor);
        } else {
            writer.tensors.push(tensor);
        }
    }
    if join {
        projections.sort_by(|a, b| a.name.cmp(&b.name));
        let [e, h] = <[TensorSpec; 2]>::try_from(projections).expect("two projections");
        let row = e.data.len() / e.dims[1] as usize;
        let data = e.data.chunks(row).zip(h.data.chunks(row)).flat_map(|(e, h)| [e, h].concat()).collect();
        let name = format!("blk.{layers}.nextn.eh_proj.weight").into_bytes();
        writer.tensors.push(TensorSpec { name, dims: vec![2 * e.dims[0], e.dims[1]], data, ..e });
    }
    writer
}

/// Only the first of the ratios, for a file that has none for draft blocks.
fn ratios(mut writer: GgufWriter, s: &V4Sizes, n: usize) -> GgufWriter {
    writer.metadata.retain(|(name, _)| name != b"deepseek4.attention.compress_ratios");
    let ratios: Vec<u8> = s.ratios[..n].iter().flat_map(|&ratio| (ratio as i32).to_le_bytes()).collect();
    writer.value("deepseek4.attention.compress_ratios", ValueType::Array, array(ValueType::I32, n as u64, &ratios))
}

fn drafted(path: &Path, numerics: Numerics, ids: &[u32]) -> Vec<f32> {
    let (mut dev, model) = load_with(path, 2, &|config| {
        config.set_numerics(numerics);
        config.draft = true;
    });
    let Model::DeepseekV4(mut model) = model else { panic!("a DeepSeek-V4") };
    draft_logits(&mut dev, &mut model, ids, 64)
}

/// The draft block under every name that it has, with and without a ratio of its own, from float and from integer-coded
/// tensors: the same bits. And it is counted as a draft block.
#[test]
fn a_draft_block_is_found_under_both_names() {
    let ids = Golden::open("golden.safetensors").ids("mid.input_ids");
    let sizes = fixture_sizes();
    let want = drafted(&native(), Numerics::Reference, &ids);
    let recipe = two_bit();
    let of_recipe = written("draft-recipe", &recipe);
    let coded = drafted(&of_recipe.0, Numerics::Serving, &ids);
    let mut compared = 0;
    for (i, (join, n)) in [(true, 5), (true, 4), (false, 5)].into_iter().enumerate() {
        let file = written(&format!("draft-{i}"), &ratios(counting_drafts(fixture(), 4, join), &sizes, n));
        let what = format!("joined {join}, {n} ratios");
        compared += same_bits(&drafted(&file.0, Numerics::Reference, &ids), &want, &what);
        let opened = ModelFile::open(&file.0).expect("it opens");
        let Ok(ModelConfig::DeepseekV4(config)) = ModelConfig::read(&opened) else { panic!("a DeepSeek-V4") };
        assert_eq!(config.layers.len(), 4, "{what}");
        let (report, plain) = (Report::new(&opened, &config), written("draft-plain", &fixture()));
        let plain = Report::new(&ModelFile::open(&plain.0).expect("it opens"), &config);
        assert!(report.draft_bytes > 0 && report.draft_bytes == plain.draft_bytes, "{what}");
        assert_eq!(report.classes, plain.classes, "{what}");

        let file = written(&format!("draft-coded-{i}"), &ratios(counting_drafts(recipe.clone(), 4, join), &sizes, n));
        compared += same_bits(&drafted(&file.0, Numerics::Serving, &ids), &coded, &format!("coded, {what}"));
    }
    assert_eq!(compared, 6 * 138 * VOCAB);
    // A projection that is not there.
    let mut wrong = counting_drafts(recipe, 4, true);
    wrong.tensors.retain(|tensor| !tensor.name.ends_with(b"nextn.eh_proj.weight"));
    let file = written("draft-wrong", &wrong);
    let opened = ModelFile::open(&file.0).expect("it opens");
    let mut config = ModelConfig::read(&opened).expect("a configuration");
    let ModelConfig::DeepseekV4(v4) = &mut config else { panic!("a DeepSeek-V4") };
    v4.draft = true;
    let found = Model::load(&mut Cpu::new(1, limits()), &opened, &config, &limits()).err().expect("no projection");
    assert!(found.to_string().contains("blk.4.nextn.e_proj.weight"), "{found}");
}

/// The recipe with 4-bit experts: Q4_K for gate and up, MXFP4 for down.
#[test]
fn four_bit_experts_run() {
    let mut writer = two_bit();
    let mut changed = 0;
    let random = |n: usize, seed: usize| (0..n).map(move |i| (((i + seed) * 2_654_435_761) >> 13) as u8);
    for (seed, tensor) in writer.tensors.iter_mut().enumerate() {
        let name = String::from_utf8(tensor.name.clone()).expect("UTF-8");
        let format = match name.rsplit('.').nth(1) {
            Some("ffn_gate_exps" | "ffn_up_exps") => Format::Q4K,
            Some("ffn_down_exps") => Format::Mxfp4,
            _ => continue,
        };
        let n: u64 = tensor.dims.iter().product();
        let blocks = n as usize / format.block_len();
        let mut data: Vec<u8> = random(blocks * format.block_bytes(), seed).collect();
        for block in data.chunks_exact_mut(format.block_bytes()) {
            if format == Format::Q4K {
                // d and dmin of 2^-11 and 2^-8: codes around 7.5 with sub-scales of up to 63.
                block[..4].copy_from_slice(&[0x00, 0x10, 0x00, 0x1c]);
            } else {
                block[0] = 122;
            }
        }
        tensor.data = data;
        tensor.code = format.ggml_type().expect("GGUF has the format");
        changed += 1;
    }
    assert_eq!(changed, 3 * 5);
    let file = written("four-bit", &writer);
    let ids: Vec<u32> = (0..100).map(|i| (i * 97 + 13) % VOCAB as u32).collect();
    let want = Rig::load(&file.0, Numerics::Serving, 2).prompt(0, &ids, ids.len());
    assert!(want.iter().all(|x| x.is_finite()) && want.iter().any(|x| x.abs() > 1.0));
    let got = Rig::load(&file.0, Numerics::Serving, 1).prompt(0, &ids, 7);
    assert_eq!(same_bits(&got, &want, "chunks of 7 on one thread"), 100 * VOCAB);
    let floats = Rig::load(&file.0, Numerics::Reference, 2).prompt(0, &ids, ids.len());
    let (kl, same) = v4::divergence(&want, &floats);
    eprintln!("serving against reference: mean KL {kl:.2e}, same argmax {same:.3}");
    assert!(kl < 0.1 && same > 0.7, "{kl} {same}");
}

#[test]
fn metadata_that_cannot_be_true_is_refused_by_its_key() {
    let set = |key: &str, value: u32| {
        let mut writer = metadata(&fixture_sizes());
        writer.metadata.retain(|(name, _)| name != format!("deepseek4.{key}").as_bytes());
        writer.u32(&format!("deepseek4.{key}"), value).tensor("token_embd.weight", Format::F32, &[1, 1], vec![0; 4])
    };
    let problem = |writer: &GgufWriter| -> Option<LoadError> {
        let file = written("refused", writer);
        ModelConfig::read(&ModelFile::open(&file.0).expect("the container is sound")).err()
    };
    assert!(problem(&set("expert_count", 6)).is_none(), "what is true");
    for (key, value) in [
        ("attention.head_count_kv", 2),
        ("hyper_connection.count", 2),
        ("rope.dimension_count", 32),
        ("attention.value_length", 64),
        ("expert_shared_count", 2),
        ("attention.compress_ratios", 4),
        ("swiglu_clamp_exp", 10),
        ("block_count", 9),
        ("block_count", 0),
    ] {
        let found = problem(&set(key, value)).map(|error| error.to_string()).unwrap_or_default();
        let named = if key == "block_count" { "attention.compress_ratios" } else { key };
        assert!(found.contains(named), "{key} = {value}: {found}");
    }
}
