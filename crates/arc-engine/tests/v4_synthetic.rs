//! DeepSeek-V4 of random weights, without a file: every kind of layer in the 2-bit recipe, from one name.

mod v4;

use std::path::Path;

use arc_engine::load::ModelFile;
use arc_engine::load::synthetic::table::Class;
use arc_engine::model::ModelConfig;
use arc_engine::model::deepseek_v4::{Numerics, Report};
use v4::{Rig, VOCAB, best, native, same_bits};

const TINY: &str = "synthetic:deepseek-v4-tiny";

fn rig(name: &str, numerics: Numerics, threads: usize) -> Rig {
    Rig::load(Path::new(name), numerics, threads)
}

/// Tokens of no meaning.
fn ids(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 7919 + i * i * 31 + 5) % VOCAB as u32).collect()
}

/// Prefill and decode: whatever the threads and the chunks, and in a second load, the same bits; finite; and of another
/// seed others.
#[test]
fn tiny_runs_and_everything_that_may_not_matter_does_not() {
    let ids = ids(150);
    let mut compared = 0;
    for numerics in [Numerics::Serving, Numerics::Reference] {
        let mut first = rig(TINY, numerics, 2);
        let want = first.prompt(0, &ids, ids.len());
        assert!(want.iter().all(|logit| logit.is_finite()));
        for (threads, chunks) in [(1, &[16, 150][..]), (3, &[1, 7, 128, 150])] {
            let mut again = rig(TINY, numerics, threads);
            for &chunk in chunks {
                let got = again.prompt(0, &ids, chunk);
                compared += same_bits(&got, &want, &format!("{numerics:?}, chunks of {chunk} on {threads} threads"));
            }
        }
        let greedy = first.greedy(1, &ids[..40], 12);
        assert_eq!(greedy, rig(TINY, numerics, 1).greedy(0, &ids[..40], 12));
        assert_eq!(greedy[0] as usize, best(&want[39 * VOCAB..40 * VOCAB]));
        let spread = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32;
        let spread = spread(&want[want.len() - VOCAB..]).sqrt();
        assert!((0.5..20.0).contains(&spread), "logits have a spread of {spread}");
        let other = rig("synthetic:deepseek-v4-tiny,seed=1", numerics, 2).prompt(0, &ids, ids.len());
        assert!(other.iter().zip(&want).filter(|(a, b)| a.to_bits() != b.to_bits()).count() > other.len() / 2);
    }
    assert_eq!(compared, 2 * 6 * 150 * VOCAB);
}

fn report(name: &str) -> Report {
    let file = ModelFile::open(Path::new(name)).expect("a synthetic name, or the fixture");
    let ModelConfig::DeepseekV4(config) = ModelConfig::read(&file).expect("read") else { panic!("a DeepSeek-V4") };
    Report::new(&file, &config)
}

/// The published sizes of DeepSeek-V4-Flash, and what a token and a sequence take of it.
#[test]
fn flash_takes_what_its_description_says() {
    let flash = report("synthetic:deepseek-v4-flash");
    assert_eq!((flash.parameters() + 50_000_000) / 100_000_000, 2843);
    assert_eq!(flash.released_tensors, Some(67_612));
    let mb = |bytes: u64| bytes as f64 / 1e6;
    assert!((mb(flash.read_bytes()) - 9556.0).abs() < 1.5, "{:.1} MB a token", mb(flash.read_bytes()));
    assert!((mb(flash.bytes()) - 86_700.0).abs() < 100.0, "{:.1} MB in all", mb(flash.bytes()));
    let expected = [
        (Class::Attention, 4886.5),
        (Class::Routed, 1826.1),
        (Class::Shared, 1149.8),
        (Class::Head, 562.6),
        (Class::Compressor, 520.2),
        (Class::Indexer, 451.4),
        (Class::Hyper, 67.8),
        (Class::Router, 90.2),
    ];
    for (class, mb_read) in expected {
        let row = flash.classes.iter().find(|row| row.class == class).expect("a line for every class");
        assert!((mb(row.read_bytes) - mb_read).abs() < 1.0, "{}: {:.1} MB", class.name(), mb(row.read_bytes));
    }
    // Rows of 584 bytes, a spare one included, in 144 places of 43 layers; 16 tokens of (1024 + 256) values and as many gates in 21 layers; 144
    // of 512 and 512 in 20.
    let state = flash.sequence;
    assert_eq!(state.window, 43 * 144 * (448 + 2 * 64 + 8));
    assert_eq!(state.sparse_rings, 21 * 16 * 2 * (1024 + 256) * 4);
    assert_eq!(state.heavy_rings, 20 * 144 * 2 * 512 * 4);
    // A row for 4 tokens in sparse layers, with an index row of 68 bytes; in heavy ones a row for each block of 32.
    let per_token = (21 * (584 + 68) * 8 + 20 * 584_usize).div_ceil(32);
    assert_eq!(flash.kv_bytes_per_token, per_token);
}

/// Names of a released checkpoint lead to the same classes.
#[test]
fn the_fixture_is_counted_as_the_synthetic_one_is() {
    let fixture = report(native().to_str().expect("UTF-8"));
    let synthetic = report(TINY);
    assert_eq!(fixture.released_tensors, Some(fixture.tensors));
    assert!(fixture.draft_bytes > 0 && synthetic.draft_bytes > 0);
    let classes = |report: &Report| report.classes.iter().map(|row| row.class).collect::<Vec<_>>();
    assert_eq!(classes(&fixture), classes(&synthetic));
    let routed = |report: &Report| *report.classes.iter().find(|row| row.class == Class::Routed).expect("experts");
    // Four of six experts.
    for routed in [routed(&fixture), routed(&synthetic)] {
        assert_eq!(routed.read_bytes * 6, routed.bytes * 4);
    }
}
