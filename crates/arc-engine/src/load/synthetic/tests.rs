use std::collections::{BTreeMap, BTreeSet};

use arc_device::format::Format;

use super::table::{Draw, Stored, TensorSpec, parameters, released};
use super::*;

fn open(name: &str) -> Synthetic {
    Synthetic::open(name).expect(name)
}

/// Numbers of the released models, from their published descriptions: parameters, tensors, and what a token reads in
/// the 2-bit recipe.
#[test]
fn totals_of_the_released_models() {
    let flash = V4Sizes::flash();
    assert_eq!((flash.n_layers(), flash.ratios.len()), (43, 44));
    assert_eq!(parameters(&flash) / 100_000_000, 2843);
    assert_eq!((parameters(&V4Sizes::pro()) + 500_000_000) / 1_000_000_000, 1573);
    let trunk = released(&flash).into_iter().filter(|tensor| !tensor.name.starts_with("mtp."));
    assert_eq!(trunk.map(|tensor| tensor.n_tensors()).sum::<usize>(), 67_612);

    let model = open("synthetic:deepseek-v4-flash");
    let trunk: u64 = model.tensors().iter().filter(|t| !t.mtp).map(|t| t.n_bytes() as u64).sum();
    assert_eq!(trunk / 100_000_000, 867);
    let mb = |bytes: u64| bytes as f64 / 1e6;
    let read = model.read_bytes();
    for (class, expected) in [
        (Class::Attention, 4886.5),
        (Class::Routed, 1826.1),
        (Class::Shared, 1149.8),
        (Class::Head, 562.6),
        (Class::Compressor, 520.2),
        (Class::Indexer, 451.4),
        (Class::Hyper, 67.8),
        (Class::Router, 90.2),
    ] {
        let found = mb(read[&class]);
        assert!((found - expected).abs() < 1.0, "{}: {found:.1} MB, expected {expected}", class.name());
    }
    let total = mb(read.values().sum());
    assert!((total - 9556.0).abs() < 1.5, "{total:.1} MB a token");
}

/// Kind, spread and mean of every tensor of the tiny model.
#[test]
fn values_are_finite_and_spread_as_they_should() {
    let model = open("synthetic:deepseek-v4-tiny");
    let mut formats = BTreeSet::new();
    for tensor in model.tensors() {
        let bytes = model.bytes(tensor);
        assert_eq!(bytes.len(), tensor.n_bytes());
        let (Some(format), Draw::Values { mean, std }) = (tensor.format, tensor.draw) else {
            assert_picks(&model, tensor, &bytes);
            continue;
        };
        formats.insert(format);
        let mut values = vec![0.0; tensor.n_values() as usize];
        format.decode_row(&bytes, &mut values);
        assert!(values.iter().all(|v| v.is_finite()), "{}", tensor.name);
        if values.len() < 4096 {
            continue;
        }
        let n = values.len() as f64;
        let found_mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let square = values.iter().map(|&v| (f64::from(v) - found_mean).powi(2)).sum::<f64>() / n;
        let (mean, std) = (f64::from(mean), f64::from(std));
        // Block scales are up to an eighth above what the deviation asks for.
        let ratio = square.sqrt() / std;
        assert!((0.95..1.15).contains(&ratio), "{}: deviation {ratio} times what it should be", tensor.name);
        assert!((found_mean - mean).abs() < 0.05 * std, "{}: mean {found_mean}, deviation {std}", tensor.name);
    }
    assert_eq!(formats.len(), 5);
}

fn assert_picks(model: &Synthetic, tensor: &TensorSpec, bytes: &[u8]) {
    let Draw::Picks(n) = tensor.draw else { panic!("{} has no format", tensor.name) };
    assert_eq!((n, tensor.cols()), (model.sizes.n_experts, model.sizes.experts_per_token));
    let mut seen = vec![0; n];
    for row in bytes.chunks_exact(tensor.row_bytes()) {
        let ids: BTreeSet<u32> =
            row.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().expect("4 bytes"))).collect();
        assert_eq!(ids.len(), tensor.cols(), "an expert twice: {ids:?}");
        ids.into_iter().for_each(|id| seen[id as usize] += 1);
    }
    let even = tensor.rows() * tensor.cols() / n;
    assert!(seen.iter().all(|&seen| seen * 10 > even * 8 && seen * 10 < even * 12), "{seen:?}");
}

/// Any run of rows has the bytes it has in the whole tensor; other seeds and names have others.
#[test]
fn a_row_depends_on_seed_name_and_place_alone() {
    let model = open("synthetic:deepseek-v4-slice,experts=8,vocab=64,seed=5");
    assert_eq!((model.seed, model.sizes.vocab, model.sizes.n_experts), (5, 64, 8));
    let other = open("synthetic:deepseek-v4-slice,seed=6,vocab=64,experts=8");
    for name in ["blk.1.ffn_down_exps.weight", "blk.0.ffn_gate_tid2eid.weight", "blk.3.attn_norm.weight"] {
        let tensor = model.find(name).expect(name);
        let (n, row_bytes) = (3.min(tensor.rows()), tensor.row_bytes());
        let mut run = vec![0; n * row_bytes];
        model.fill(tensor, tensor.rows() - n, &mut run);
        for (i, row) in run.chunks_exact(row_bytes).enumerate() {
            let mut alone = vec![0xff; row_bytes];
            model.fill(tensor, tensor.rows() - n + i, &mut alone);
            assert_eq!(row, alone, "{name} row {i} of the run");
        }
        let mut elsewhere = vec![0; n * row_bytes];
        other.fill(tensor, tensor.rows() - n, &mut elsewhere);
        assert_ne!(run, elsewhere, "{name}: the seed does not matter");
    }
    let row = |name: &str| {
        let tensor = model.find(name).expect(name);
        let mut out = vec![0; tensor.row_bytes()];
        model.fill(tensor, 0, &mut out);
        out
    };
    assert_ne!(row("blk.1.ffn_gate_exps.weight"), row("blk.1.ffn_up_exps.weight"));
    assert_ne!(row("blk.1.ffn_gate_exps.weight"), row("blk.2.ffn_gate_exps.weight"));
}

/// The bits of one tensor of each format, so that a change of generator or compiler is seen. The first and the last were
/// computed by a second implementation too.
#[test]
fn the_bits_are_pinned() {
    let model = open("synthetic:deepseek-v4-tiny,seed=1");
    let hash = |name: &str| {
        let bytes = model.bytes(model.find(name).expect(name));
        bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3))
    };
    let found = [
        "blk.0.attn_norm.weight",
        "token_embd.weight",
        "blk.2.attn_q_b.weight",
        "blk.3.ffn_up_exps.weight",
        "mtp.0.ffn_down_exps.weight",
        "blk.1.ffn_gate_tid2eid.weight",
    ]
    .map(hash);
    let pinned = [
        0xa16d_0d98_a780_f723,
        0x29a1_3b96_d6d8_adbf,
        0xd795_ef48_7b54_7204,
        0x70e7_8427_8ae6_b63d,
        0x967c_ba96_e7dc_2d22,
        0xe62b_21a0_1e97_8882,
    ];
    assert_eq!(found, pinned, "{found:#x?}");
}

#[test]
fn kinds_of_layers_and_names() {
    let slice = open("synthetic:deepseek-v4-slice,experts=16");
    let kinds: Vec<(usize, bool)> = (0..5).map(|i| slice.sizes.layer(i)).map(|l| (l.ratio, l.hash)).collect();
    assert_eq!(kinds, [(0, true), (4, true), (4, false), (128, false), (0, false)]);
    let shape = |name: &str| slice.find(name).expect(name).shape.to_vec();
    assert_eq!(shape("blk.2.ffn_gate_exps.weight"), [16, 2048, 4096]);
    assert_eq!(shape("blk.3.attn_compressor_ape.weight"), [128, 512]);
    assert_eq!(shape("blk.1.indexer.attn_q_b.weight"), [8192, 1024]);
    assert_eq!(shape("mtp.0.hc_head_fn.weight"), [4, 16384]);
    assert!(slice.find("blk.0.attn_compressor_kv.weight").is_none());
    assert!(slice.find("blk.3.indexer.proj.weight").is_none());
    assert!(slice.find("blk.0.exp_probs_b.bias").is_none());
    assert!(slice.total_bytes() < 4 << 30, "{}", slice.total_bytes());
    for name in NAMES {
        let model = open(&format!("{PREFIX}{name}"));
        assert_eq!(model.by_name.len(), model.tensors().len(), "a name twice in {name}");
        for tensor in model.tensors() {
            assert_eq!(tensor.n_bytes(), tensor.rows() * tensor.row_bytes());
        }
    }
}

/// The names and shapes of a released checkpoint, read off a small one of the same kind.
#[test]
fn released_names_have_their_scales() {
    let tensors = released(&V4Sizes::tiny());
    let names: BTreeSet<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names.len(), tensors.len());
    for name in [
        "embed.weight",
        "layers.1.attn.indexer.compressor.wgate.weight",
        "layers.3.ffn.experts.5.w2",
        "layers.0.ffn.gate.tid2eid",
        "mtp.0.e_proj",
        "mtp.0.hc_head_base",
    ] {
        assert!(names.contains(name), "{name}");
    }
    // 90 packed experts, 44 FP8 matrices, their scales, and what has none.
    let count = |stored| tensors.iter().filter(|tensor| tensor.stored == stored).count();
    assert_eq!((count(Stored::Fp4), count(Stored::Fp8), count(Stored::I64)), (90, 44, 2));
    assert_eq!(tensors.iter().map(|tensor| tensor.n_tensors()).sum::<usize>(), 367);
}

/// Every released tensor is some rows of one tensor here, and every row here is of exactly one.
#[test]
fn released_names_lead_to_the_rows_that_hold_them() {
    let model = open("synthetic:deepseek-v4-tiny");
    let mut covered: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for spec in released(&model.sizes) {
        let (tensor, rows) = model.released(&spec.name).expect(&spec.name);
        assert_eq!(rows.len() * tensor.cols(), spec.shape.iter().product::<usize>(), "{}", spec.name);
        assert_eq!(tensor.cols(), *spec.shape.last().expect("no scalars"), "{}", spec.name);
        covered.entry(&tensor.name).or_default().extend(rows.clone());
        if spec.n_tensors() == 2 {
            let (again, same) = model.released(&format!("{}.weight", spec.name)).expect("with .weight");
            assert_eq!((&again.name, same), (&tensor.name, rows));
        }
    }
    assert_eq!(covered.len(), model.tensors().len());
    for (name, rows) in covered {
        assert_eq!(rows, (0..model.find(name).expect(name).rows()).collect::<Vec<_>>(), "{name}");
    }
    let (tensor, rows) = model.released("layers.3.ffn.experts.5.w2.weight").expect("an expert");
    assert_eq!((tensor.name.as_str(), rows), ("blk.3.ffn_down_exps.weight", 5 * 256..6 * 256));
    for name in [
        "layers.3.ffn.experts.6.w1",
        "layers.3.ffn.experts.05.w1",
        "layers.9.attn.wkv",
        "layers.0.attn.wkv.scale",
        "layers.0.e_proj",
        "blk.0.attn_kv.weight",
        "embed",
        "layers.",
        "",
    ] {
        assert!(model.released(name).is_none(), "{name}");
    }
}

#[test]
fn names_and_options_that_do_not_fit_are_refused() {
    for (name, says) in [
        ("synthetic:deepseek-v5", "must be synthetic: and one of"),
        ("synthetic:", "must be synthetic: and one of"),
        ("synthetic:deepseek-v4-tiny,experts=3", "experts is 3, must be from 4 to 1024"),
        ("synthetic:deepseek-v4-tiny,experts", "experts needs a whole number"),
        ("synthetic:deepseek-v4-tiny,seed=x", "seed needs a whole number"),
        ("synthetic:deepseek-v4-tiny,vocab=99999999", "vocab is 99999999, must be from 16 to 1048576"),
        ("synthetic:deepseek-v4-tiny,layers=3", "layers is no option"),
    ] {
        let error = Synthetic::open(name).expect_err(name).to_string();
        assert!(error.contains(says) && error.starts_with(name), "{error}");
    }
    assert!(Synthetic::is_name("synthetic:x") && !Synthetic::is_name("model.gguf"));
    assert_eq!(
        open("synthetic:deepseek-v4-tiny").find("blk.0.attn_kv.weight").expect("there").format,
        Some(Format::Q8_0)
    );
}
