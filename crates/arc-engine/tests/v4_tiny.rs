//! DeepSeek-V4 against the goldens of the tiny fixture, on the CPU: transformers in float32 for what it has, and for
//! everything that may not matter (chunks, threads, neighbours, who had the slot before) bits against bits.

mod v4;

use std::path::Path;

use arc_device::cpu::Cpu;
use arc_device::step::{CtxClass, Part, StepDelta, StepKey};
use arc_device::{Landing, Readback, Steps};
use arc_engine::model::Model;
use arc_engine::model::deepseek_v4::{Numerics, Point, V4Config};
use v4::{
    Golden, Rig, VOCAB, admit, bf16, dequantised, divergence, draft_logits, folder, load, load_with, native, rows,
    same_bits, worst,
};

/// What the fixture's README asks of f32 engines.
const TOLERANCE: f32 = 1e-4;

fn close(got: &[f32], want: &[f32], cols: usize, what: &str) {
    let (error, at) = worst(got, want);
    eprintln!("{what}: {error:.2e} at row {} column {}", at / cols, at % cols);
    assert!(error <= TOLERANCE, "{what}: {error} at row {} column {}", at / cols, at % cols);
}

fn check(folder: &Path, what: &str) {
    let golden = Golden::open("golden.safetensors");
    let mut rig = Rig::load(folder, Numerics::Reference, 2);
    for name in ["short", "mid", "long"] {
        let ids = golden.ids(&format!("{name}.input_ids"));
        let logits = rig.prompt(0, &ids, ids.len());
        close(&logits, &golden.floats(&format!("{name}.logits")), VOCAB, &format!("{what} {name}"));
        let greedy = rig.greedy(1, &ids, 64);
        assert_eq!(greedy, golden.ids(&format!("{name}.greedy_ids")), "{what} {name}");
    }
    let ids = golden.ids("long.input_ids");
    let logits = rig.prompt(2, &ids, 1);
    let decoded = golden.ids("long.decode_rows");
    let got: Vec<f32> =
        decoded.iter().flat_map(|&r| logits[r as usize * VOCAB..(r as usize + 1) * VOCAB].to_vec()).collect();
    assert_eq!(decoded.len(), 65);
    close(&got, &golden.floats("long.decode_logits"), VOCAB, &format!("{what} long, token by token"));
}

#[test]
fn native_gives_the_goldens() {
    check(&native(), "native");
}

/// The two folders hold the same function, so their logits are the same bits.
#[test]
fn bf16_gives_the_goldens_and_the_bits_of_native() {
    let folder = bf16();
    check(&folder, "bf16");
    let ids = Golden::open("golden.safetensors").ids("mid.input_ids");
    let want = Rig::load(&native(), Numerics::Reference, 2).prompt(0, &ids, ids.len());
    let got = Rig::load(&folder, Numerics::Reference, 2).prompt(0, &ids, ids.len());
    std::fs::remove_dir_all(&folder).expect("the folder is the test's own");
    assert_eq!(same_bits(&got, &want, "bf16"), 139 * VOCAB);
}

/// What happens inside: mixing, choices of experts and of compressed rows, and the outputs of every block.
#[test]
fn intermediates_are_those_of_the_golden() {
    let golden = Golden::open("intermediates_mid.safetensors");
    let ids = Golden::open("golden.safetensors").ids("mid.input_ids");
    let (n, hidden, top) = (ids.len(), 128, 8);
    let kept = golden.ids("kept_rows");
    let (mut dev, model) = load(&native(), Numerics::Reference, 2);
    let Model::DeepseekV4(mut model) = model else { panic!("the fixture is a DeepSeek-V4") };
    let mut compared = 0;
    let mut tap = |dev: &mut Cpu, point: Point, ws: &arc_engine::model::deepseek_v4::Workspace<Cpu>| {
        let mut read = |buf, len: usize| {
            let mut out = vec![0.0; len];
            dev.read(buf, &mut out).map(|()| out)
        };
        let keep = |all: &[f32], width: usize| -> Vec<f32> {
            kept.iter().flat_map(|&r| all[r as usize * width..(r as usize + 1) * width].to_vec()).collect()
        };
        compared += 1;
        let (layer, site, block) = match point {
            Point::Attention(layer) => (layer, "hc_attn", "attn_out"),
            Point::Experts(layer) => (layer, "hc_ffn", "moe_out"),
            Point::Merged => {
                close(&keep(&read(&ws.h, n * hidden)?, hidden), &golden.floats("hc_head"), hidden, "hc_head");
                let streams = keep(&read(&ws.streams.x, 4 * n * hidden)?, 4 * hidden);
                close(&streams, &golden.floats("layer3.streams"), 4 * hidden, "layer3.streams");
                return Ok(());
            }
        };
        let at = format!("layer{layer}");
        let y = keep(&read(&ws.y, n * hidden)?, hidden);
        close(&y, &golden.floats(&format!("{at}.{block}")), hidden, &format!("{at}.{block}"));
        let mixing = read(&ws.streams.mixing, n * 24)?;
        for (name, from, width) in [("pre", 0, 4), ("post", 4, 4), ("comb", 8, 16)] {
            let got: Vec<f32> = mixing.chunks(24).flat_map(|m| m[from..from + width].to_vec()).collect();
            close(&got, &golden.floats(&format!("{at}.{site}.{name}")), width, &format!("{at}.{site}.{name}"));
        }
        if let (Point::Attention(1..), true) = (point, layer > 0) {
            let streams = keep(&read(&ws.streams.x, 4 * n * hidden)?, 4 * hidden);
            let before = format!("layer{}.streams", layer - 1);
            close(&streams, &golden.floats(&before), 4 * hidden, &before);
        }
        if matches!(point, Point::Attention(1 | 3)) {
            let mut picks = vec![0; n * top];
            dev.read(&ws.attention.picks, &mut picks)?;
            let want = golden.ids(&format!("{at}.index_topk"));
            for t in 0..n {
                let mut want: Vec<u32> = want[t * top..(t + 1) * top].iter().copied().filter(|&w| w < 512).collect();
                want.sort_unstable();
                let visible = (t + 1) / 4;
                // Where all are read, nothing is chosen.
                let all: Vec<u32> = (0..visible as u32).collect();
                let got = if visible > top { &picks[t * top..(t + 1) * top] } else { &all };
                assert_eq!(got, want, "{at} row {t}");
            }
        }
        if let Point::Experts(_) = point {
            let mut chosen = vec![0; n * 4];
            dev.read(&ws.experts.ids, &mut chosen)?;
            assert_eq!(chosen, golden.ids(&format!("{at}.router_pick")), "{at}");
            let mut weights = vec![0.0; n * 4];
            dev.read(&ws.experts.weights, &mut weights)?;
            close(&weights, &golden.floats(&format!("{at}.router_weight")), 4, &format!("{at}.router_weight"));
        }
        Ok(())
    };
    let delta = StepDelta { admit: vec![admit(0, 0)], rows: Some(rows(0, &ids)), ..StepDelta::default() };
    dev.stage(&delta).expect("staged");
    let key = StepKey::new(n as u32, n as u32, CtxClass::Short, Part::Forward);
    dev.step(key, &mut |dev| model.draw_tapped(dev, key, &mut tap)).expect("a step");
    assert_eq!(compared, 9, "two blocks in each of four layers, and the head");
}

/// Chunks and threads change nothing, to the last bit.
#[test]
fn rows_are_invariant() {
    let ids = Golden::open("golden.safetensors").ids("long.input_ids");
    let mut compared = 0;
    for numerics in Numerics::ALL {
        let want = Rig::load(&native(), numerics, 2).prompt(0, &ids, ids.len());
        for (threads, chunks) in [(1, &[16, 300][..]), (3, &[1, 3, 16, 127, 128, 129])] {
            let mut rig = Rig::load(&native(), numerics, threads);
            for &chunk in chunks {
                // The slot, its rings and its blocks hold what the last round left.
                let got = rig.prompt(0, &ids, chunk);
                compared += same_bits(&got, &want, &format!("{numerics:?}, chunks of {chunk} on {threads} threads"));
            }
        }
    }
    assert_eq!(compared, 4 * 8 * 300 * VOCAB);
}

/// Sequences of different lengths share steps, one is admitted into a slot that another just left, and a prompt that is
/// shorter than any compressor's window follows a long one: each gives what it gives alone.
#[test]
fn strangers_change_nothing() {
    let golden = Golden::open("golden.safetensors");
    let [short, mid, long] = ["short", "mid", "long"].map(|name| golden.ids(&format!("{name}.input_ids")));
    let alone = |ids: &[u32]| Rig::load(&native(), Numerics::Reference, 2).prompt(0, ids, ids.len());
    let want = [&short, &mid, &long].map(|ids| alone(ids));
    let mut rig = Rig::load(&native(), Numerics::Reference, 2);
    // Long in slot 3, a few tokens a step; mid, short and short again one after the other in slot 1, by one token.
    let (mut got_long, mut got_others) = (Vec::new(), vec![Vec::new(); 3]);
    let others: Vec<(usize, u32)> =
        [&mid, &short, &short].iter().enumerate().flat_map(|(i, ids)| ids.iter().map(move |&id| (i, id))).collect();
    let mut last = usize::MAX;
    for (step, tokens) in long.chunks(2).enumerate() {
        let mut admits = if step == 0 { vec![admit(3, 0)] } else { Vec::new() };
        let other = others.get(step);
        if let Some(&(i, _)) = other.filter(|other| other.0 != last) {
            admits.push(admit(1, 0));
            last = i;
        }
        let mut table = rows(3, tokens);
        if let Some(&(_, id)) = other {
            table.extend(rows(1, &[id]));
        }
        let logits = rig.step(admits, table);
        let (ours, theirs) = logits.split_at(tokens.len() * VOCAB);
        got_long.extend_from_slice(ours);
        if let Some(&(i, _)) = other {
            got_others[i].extend_from_slice(theirs);
        }
    }
    assert_eq!(same_bits(&got_long, &want[2], "long"), 300 * VOCAB);
    let got_mid = &got_others[0];
    assert!(same_bits(got_mid, &want[1][..got_mid.len()], "mid") > 130 * VOCAB);
    for (i, got) in got_others[1..].iter().enumerate() {
        same_bits(got, &want[0][..got.len()], &format!("short, time {i}"));
    }
    // Where nothing else runs: the slot of the long one, right after it.
    assert_eq!(same_bits(&rig.prompt(3, &short, 7), &want[0], "short after long"), 7 * VOCAB);
}

/// Tokens that were computed and taken back leave no trace, in every phase of both compressors' windows: at each position
/// up to 272, one to four wrong tokens are run and taken back, and what follows is what never running them gives.
#[test]
fn taking_positions_back_is_a_cursor_move() {
    let ids = Golden::open("golden.safetensors").ids("long.input_ids");
    for numerics in [Numerics::Serving, Numerics::Reference] {
        let want = Rig::load(&native(), numerics, 2).prompt(0, &ids, ids.len());
        let mut rig = Rig::load(&native(), numerics, 2);
        let (mut cases, mut compared) = (0, 0);
        let mut check = |got: &[f32], at: usize, k: usize| {
            let n = got.len() / VOCAB;
            compared +=
                same_bits(got, &want[at * VOCAB..(at + n) * VOCAB], &format!("{k} tokens after {at} taken back"));
        };
        check(&rig.step(vec![admit(0, 0)], rows(0, &ids[..1])), 0, 0);
        for n in 1..=272 {
            for k in 1..=4 {
                let wrong: Vec<u32> = ids[n..n + k].iter().map(|id| (id + 100) % VOCAB as u32).collect();
                let back = || vec![admit(0, n as u32)];
                rig.step(back(), rows(0, &wrong));
                // Fewer than were taken back, so that some of those are still in the rings.
                check(&rig.step(back(), rows(0, &ids[n..n + k.div_ceil(2)])), n, k);
                cases += 1;
            }
            check(&rig.step(vec![admit(0, n as u32)], rows(0, &ids[n..=n])), n, 4);
        }
        // To the end, over every row that was pooled from positions that were taken back.
        check(&rig.step(Vec::new(), rows(0, &ids[273..])), 273, 0);
        assert_eq!((cases, compared), (272 * 4, VOCAB * (1 + 272 * 7 + ids.len() - 273)));
    }
}

/// The round trips that the model was trained with, and the released kernels' FP8 inputs. Where one flipped code changes
/// what follows, the README asks for closeness of distributions only.
#[test]
fn simulated_gives_the_goldens() {
    let golden = Golden::open("golden.safetensors");
    for (fp8_inputs, kind) in [(false, "kvix"), (true, "full")] {
        let mut rig = Rig::load(&native(), Numerics::Simulated { fp8_inputs }, 2);
        for name in ["short", "mid", "long"] {
            if fp8_inputs && name == "long" {
                continue;
            }
            let (ids, key) = (golden.ids(&format!("{name}.input_ids")), format!("{name}.{kind}.logits"));
            let logits = rig.prompt(0, &ids, ids.len());
            let exact = !matches!((name, kind), ("long", _) | ("mid", "full"));
            let want = if exact { golden.floats(&key) } else { golden.halves(&key) };
            let ((error, at), (kl, same)) = (worst(&logits, &want), divergence(&logits, &want));
            eprintln!("{key}: {error:.2e} at row {}, mean KL {kl:.2e}, same argmax {same:.3}", at / VOCAB);
            assert!(!exact || error <= 1e-3, "{key}: {error} at row {}", at / VOCAB);
            assert!(kl < 0.01, "{key}: mean KL {kl}");
            let plain = golden.floats(&format!("{name}.logits"));
            assert!(worst(&logits, &plain).0 > 0.02, "{key}: as if nothing was rounded");
        }
    }
}

/// What a server computes on. `steady` was chosen so that no code is near a tie: it finds a wrong rule, the others only
/// show that distributions stay close.
#[test]
fn serving_gives_the_goldens() {
    let (golden, serving) = (Golden::open("golden.safetensors"), Golden::open("serving.safetensors"));
    let mut rig = Rig::load(&native(), Numerics::Serving, 2);
    let steady = serving.ids("steady.input_ids");
    let want = serving.floats("steady.serving.logits");
    for chunk in [144, 1, 5] {
        let logits = rig.prompt(0, &steady, chunk);
        close(&logits, &want, VOCAB, &format!("steady in chunks of {chunk}"));
        assert_eq!(divergence(&logits, &want).1, 1.0, "argmax");
    }
    for (name, most_kl, least_same) in [("short", 2e-3, 1.0), ("mid", 0.02, 0.85), ("long", 0.02, 0.85)] {
        let (ids, key) = (golden.ids(&format!("{name}.input_ids")), format!("{name}.serving.logits"));
        let logits = rig.prompt(0, &ids, ids.len());
        let want = if name == "short" { serving.floats(&key) } else { serving.halves(&key) };
        let ((error, at), (kl, same)) = (worst(&logits, &want), divergence(&logits, &want));
        eprintln!("{key}: {error:.2e} at row {}, mean KL {kl:.2e}, same argmax {same:.3}", at / VOCAB);
        assert!(kl < most_kl && same >= least_same, "{key}: mean KL {kl}, same argmax {same}");
        assert!(name != "short" || error < 0.5, "{key}: {error} at row {}", at / VOCAB);
        let (kl, same) = divergence(&logits, &golden.floats(&format!("{name}.logits")));
        assert!(kl < 0.06 && (name == "short" || same >= 0.78), "{key} against reference: {kl}, {same}");
    }
    let (ids, gap) = (serving.ids("short.serving.greedy_ids"), serving.floats("short.serving.greedy_gap"));
    let got = rig.greedy(0, &golden.ids("short.input_ids"), 32);
    if let Some(i) = got.iter().zip(&ids).position(|(a, b)| a != b) {
        assert!(i >= 24 && gap[i] < 0.5, "token {i}, ahead by {}", gap[i]);
    }
}

/// The draft block over prompts whose tokens are all known, in any chunks: the golden's rows, and the same bits.
#[test]
fn the_draft_block_gives_the_golden() {
    let golden = Golden::open("golden.safetensors");
    let (mut dev, model) = load_with(&native(), 2, &|config| {
        config.set_numerics(Numerics::Reference);
        config.draft = true;
    });
    let Model::DeepseekV4(mut model) = model else { panic!("the fixture is a DeepSeek-V4") };
    for name in ["mid", "long"] {
        let ids = golden.ids(&format!("{name}.input_ids"));
        let mut whole: Option<Vec<f32>> = None;
        for chunk in [ids.len(), 1, 17, 128] {
            let logits = draft_logits(&mut dev, &mut model, &ids, chunk);
            let from = logits.len() - 32 * VOCAB;
            close(&logits[from..], &golden.floats(&format!("{name}.mtp_logits")), VOCAB, &format!("{name} draft"));
            same_bits(&logits, whole.get_or_insert_with(|| logits.clone()), &format!("{name} in chunks of {chunk}"));
        }
    }
    let (_, plain) = load(&native(), Numerics::Reference, 1);
    assert!(!plain.can_draft(), "not loaded unless asked for");
}

/// Models that are wrong in one thing, which the goldens must notice.
#[test]
fn deliberate_mistakes_miss_the_goldens() {
    let golden = Golden::open("golden.safetensors");
    let (ids, want) = (golden.ids("long.input_ids"), golden.floats("long.logits"));
    let error = |folder: &Path, change: &dyn Fn(&mut V4Config)| {
        let (dev, model) = load_with(folder, 2, &|config| {
            config.set_numerics(Numerics::Reference);
            change(config);
        });
        worst(&Rig::new(dev, model).prompt(0, &ids, ids.len()), &want).0
    };
    assert!(error(&native(), &|_| {}) <= TOLERANCE, "without a mistake");
    type Mistake<'a> = (&'a str, &'a dyn Fn(&mut V4Config));
    let mistakes: [Mistake<'_>; 8] = [
        ("window one short", &|config| config.attention.window -= 1),
        ("window one long", &|config| config.attention.window += 1),
        ("one index row fewer", &|config| config.index.top -= 1),
        ("no clamp", &|config| config.experts.limit = f32::INFINITY),
        ("routing weights not scaled", &|config| config.experts.router.scale = 1.0),
        ("one rope for all layers", &|config| config.compress_rope_base = config.rope_base),
        ("one normalisation", &|config| config.hc.iterations = 1),
        ("scores not scaled", &|config| config.attention.scale = 1.0),
    ];
    for (what, mistake) in mistakes {
        let error = error(&native(), mistake);
        assert!(error > 10.0 * TOLERANCE, "{what}: {error}");
    }
    for (what, name) in [
        ("gates without bias", "compressor.ape"),
        ("sinks of 0", "attn_sink"),
        ("no selection bias", "gate.bias"),
        ("sites without base", "hc_attn_base"),
    ] {
        let mut tensors = dequantised();
        let touched = tensors.iter_mut().filter(|tensor| tensor.0.ends_with(name)).map(|tensor| tensor.3.fill(0));
        assert!(touched.count() > 0, "{what}");
        let folder = folder(&name.replace('.', "-"), &tensors);
        let error = error(&folder, &|_| {});
        std::fs::remove_dir_all(&folder).expect("the folder is the test's own");
        assert!(error > 10.0 * TOLERANCE, "{what}: {error}");
    }
}
