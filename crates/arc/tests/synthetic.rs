//! Models of random weights on the command line: no file, and for `arc inspect` nothing is made either.

mod common;

use std::time::Duration;

use common::{arc, refused};

/// The table of DeepSeek-V4-Flash, in a process that may not hold a fraction of it.
#[test]
fn inspect_shows_what_flash_takes() {
    let output = arc()
        .args(["inspect", "synthetic:deepseek-v4-flash", "--step-trace", "--slots", "1"])
        .output()
        .expect("the binary is built");
    let page = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let line = |start: &str| page.lines().find(|line| line.trim_start().starts_with(start)).unwrap_or_default();
    assert_eq!(line("numerics:"), "numerics: serving");
    assert_eq!(line("trunk:"), "trunk: 284.3 B parameters, 1328 tensors, 67612 as released");
    for (class, read) in [("attention projections", "4886.5 MB"), ("routed experts", "1826.1 MB")] {
        assert!(line(class).ends_with(read), "{page}");
    }
    let total = page.lines().find(|line| line.contains("MB") && line.trim_start().starts_with("total"));
    assert!(total.is_some_and(|line| line.ends_with("9556.4 MB")), "{total:?}");
    assert_eq!(
        line("a sequence:"),
        "a sequence: 3.6 MB of window rows, 3.4 MB and 11.8 MB of compressor rings (by 4, by 128), 3788 bytes of rows a \
         token"
    );
    assert_eq!(line("rope tables:"), "rope tables: 512 bytes a position");
    // A decode step, and one that checks two drafts and makes two.
    assert_eq!(page.lines().filter(|line| line.trim_start().starts_with("attn_latent")).count(), 43 + 43 + 2);
    assert_eq!(line("speculate:"), "speculate: auto, with the draft block");
}

/// Without speculation the draft block is not loaded.
#[test]
fn a_draft_block_takes_memory_where_tokens_are_speculated_on() {
    let inspect = |speculate: &str| {
        let args = ["inspect", "synthetic:deepseek-v4-tiny", "--step-trace", "--speculate", speculate];
        let output = arc().args(args).output().expect("the binary is built");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let (off, three) = (inspect("off"), inspect("3"));
    assert!(
        off.contains("speculate: off\n") && !off.contains("draft logits") && !off.contains("sample_drafts"),
        "{off}"
    );
    assert!(three.contains("speculate: 3, with the draft block\n"), "{three}");
    assert!(three.contains("draft logits") && three.contains("sample_drafts"), "{three}");
    let refusal = "must be auto, off or an integer from 1 to 4";
    refused(
        arc().args(["inspect", "synthetic:deepseek-v4-tiny", "--speculate", "5"]),
        b"",
        1,
        refusal,
        Duration::from_secs(5),
    );
}

/// The arithmetic is one setting, whatever says it; memory follows from it.
#[test]
fn numerics_are_a_setting_of_every_layer() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let file = dir.path().join("config.toml");
    std::fs::write(&file, "numerics = \"simulated\"\n").expect("the temporary folder is writable");
    let inspect = |change: &dyn Fn(&mut std::process::Command)| {
        let mut command = arc();
        command.args(["inspect", "synthetic:deepseek-v4-tiny"]);
        change(&mut command);
        let output = command.output().expect("the binary is built");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let page = String::from_utf8(output.stdout).expect("UTF-8");
        let line = |start: &str| page.lines().find(|line| line.starts_with(start)).unwrap_or_default().to_owned();
        (line("numerics:"), line("a sequence:"))
    };
    let (serving, small) = inspect(&|_| {});
    assert_eq!(serving, "numerics: serving");
    let (reference, large) = inspect(&|command| {
        command.args(["--numerics", "reference"]);
    });
    assert_eq!(reference, "numerics: reference");
    assert_ne!(small, large);
    let of_file = |command: &mut std::process::Command| {
        command.arg("--config").arg(&file);
    };
    assert_eq!(inspect(&of_file).0, "numerics: simulated");
    let both = |command: &mut std::process::Command| {
        of_file(command);
        command.env("ARC_NUMERICS", "simulated-full");
    };
    assert_eq!(inspect(&both).0, "numerics: simulated-full");
}

#[test]
fn numerics_that_are_not_there_are_refused() {
    let (quick, tiny) = (Duration::from_secs(5), "synthetic:deepseek-v4-tiny");
    let choices = "reference or simulated or simulated-full or serving";
    refused(arc().args(["inspect", tiny]).env("ARC_NUMERICS", "bf16"), b"", 1, choices, quick);
    let listed = "reference, simulated, simulated-full, serving";
    refused(arc().args(["inspect", tiny, "--numerics", "bf16"]), b"", 2, listed, quick);
    let dense = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny/llama");
    for command in ["inspect", "serve", "bench"] {
        let mut command_line = arc();
        command_line.args([command, dense, "--numerics", "reference"]);
        if command == "serve" {
            command_line.args(["--port", "0"]);
        }
        refused(&mut command_line, b"", 1, "serving numerics only", quick);
    }
}

#[test]
fn a_gpu_that_is_not_there_is_refused() {
    let (quick, tiny) = (Duration::from_secs(5), "synthetic:deepseek-v4-tiny");
    refused(arc().args(["bench", tiny, "--device", "cuda", "--gpu", "63"]), b"", 1, "no cuda device: ", quick);
}

#[test]
fn names_that_are_wrong_and_text_are_refused() {
    let quick = Duration::from_secs(5);
    refused(arc().args(["inspect", "synthetic:deepseek-v5"]), b"", 1, "must be synthetic: and one of", quick);
    refused(arc().args(["inspect", "synthetic:deepseek-v4-tiny,experts=3"]), b"", 1, "must be from 4", quick);
    let dir = tempfile::tempdir().expect("a temporary folder");
    let text = dir.path().join("text");
    std::fs::write(&text, "hello").expect("the temporary folder is writable");
    let text = text.to_str().expect("UTF-8");
    let tiny = "synthetic:deepseek-v4-tiny";
    for words in
        [&["run", tiny, "hello"][..], &["chat", tiny], &["serve", tiny, "--port", "0"], &["eval", "ppl", tiny, text]]
    {
        refused(arc().args(words), b"hello\n", 1, "measure it with arc bench", quick);
    }
    // A folder that nobody put a tokenizer into.
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/deepseek-v4-tiny/native");
    refused(arc().args(["run", folder, "hello"]), b"", 1, "put the model's there", quick);
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_made() {
    let quick = Duration::from_secs(5);
    let flash = ["bench", "synthetic:deepseek-v4-flash", "--kv-tokens", "1073741824"];
    for part in ["GB together, but ", "free in memory: ", "--device cuda with a GPU"] {
        refused(arc().args(flash), b"", 1, part, quick);
    }
    refused(arc().args(["bench", "synthetic:deepseek-v4-tiny"]).args(&flash[2..]), b"", 1, "lower --context", quick);
}

#[test]
fn bench_makes_room_for_what_it_measures_or_says_why_not() {
    let (quick, tiny) = (Duration::from_secs(5), "synthetic:deepseek-v4-tiny");
    let cases = [
        (&["--batch", "4", "--slots", "3"][..], "`slots` is 3, but 4 sequences"),
        (&["--mixed", "--slots", "1"], "`slots` is 1, but 2 sequences"),
        (&["--pp", "600", "--context", "512"], "601 tokens are to be measured, but the context is 512: set --context"),
        (&["--depth", "1048576"], "but the context is 1048576: lower --pp"),
        (&["--ab", "burts=2"], "--ab: there is no setting `burts`; did you mean `burst`?"),
        (&["--ab", "burst=8"], "--ab burst=8: that is how it is already"),
        (&["--ab", "port=9"], "--ab: `port` changes nothing of an engine"),
        (&["--temp", "-1"], "temperature"),
    ];
    for (args, why) in cases {
        refused(arc().args(["bench", tiny]).args(args), b"", 1, why, quick);
    }
    let brief = ["--pp", "2", "--tg", "2", "--reps", "1", "--warm-up", "0", "--threads", "2", "--json"];
    for args in [&["--depth", "9000"][..], &["--batch", "3", "--queue", "1"]] {
        let output = arc().args(["bench", tiny]).args(brief).args(args).output().expect("the binary is built");
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// What is measured takes token ids, so that a model without a tokenizer can be measured.
#[test]
fn bench_runs_without_a_tokenizer() {
    let args = ["--pp", "40", "--tg", "6", "--batch", "2", "--reps", "1", "--threads", "2", "--json"];
    let output = arc().args(["bench", "synthetic:deepseek-v4-tiny"]).args(args).output().expect("the binary is built");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let page: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(page["architecture"], "deepseek_v4");
    for rate in [&page["prefill"]["tokens_per_s"]["median"], &page["decode"]["tokens_per_s"]["median"]] {
        assert!(rate.as_f64().is_some_and(|rate| rate.is_finite() && rate > 0.0), "{page}");
    }
    // Whole passes: nothing is allocated, and nothing comes back but what lands.
    let all = &page["decode"]["step"]["of_all"];
    assert!(all["steps"].as_u64() >= Some(6) && all["launches"].as_u64() > all["steps"].as_u64(), "{all}");
    assert_eq!((&all["allocs"], &all["d2h_copies"]), (&0.into(), &0.into()), "{all}");
    assert_eq!(page["settings"]["sample_on"], "device");
    // Two rows of a step go to half of the experts or more; all else is read once.
    let read = page["decode"]["bytes_per_step"].as_f64().expect("a number");
    assert!(read > 1e5, "{page}");
}

/// Two engines take turns, which differ in what was asked for and in nothing else.
#[test]
fn bench_compares_a_setting_with_itself_and_the_other() {
    let args = ["--pp", "4", "--tg", "8", "--reps", "1", "--warm-up", "0", "--threads", "2", "--temp", "0.9"];
    let ab = ["--ab", "sample_on=host", "--ab", "speculate=off", "--turns", "3", "--json"];
    let tiny = "synthetic:deepseek-v4-tiny";
    let output = arc().args(["bench", tiny]).args(args).args(ab).output().expect("the binary is built");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let page: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    for (side, sample_on, speculate) in [("a", "device", "auto"), ("b", "host", "off")] {
        let (side, of) = (&page[side], &page[side]["environment"]);
        assert_eq!(
            (&of["settings"]["sample_on"], &of["settings"]["speculate"]),
            (&sample_on.into(), &speculate.into())
        );
        assert_eq!(of["sampling"]["temperature"].as_f64().map(|t| (t - 0.9).abs() < 1e-6), Some(true), "{of}");
        for turns in ["prefill_tokens_per_s", "decode_tokens_per_s", "load_average"] {
            assert_eq!(side[turns].as_array().map(Vec::len), Some(3), "{turns} of {side}");
        }
    }
    for what in ["prefill", "decode"] {
        assert!(page[what]["ratio"].as_f64() > Some(0.0) && page[what]["drift"].as_f64() >= Some(0.0), "{page}");
    }
}
