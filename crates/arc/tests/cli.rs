//! The command line: what it answers, and what it refuses. Bad input gets one sentence and a non-zero exit.

mod common;

use std::{fs, path::PathBuf, process::Stdio, time::Duration};

use common::{SMOLLM2, arc, model, output_with, refused};

/// For refusals that need no model: the promise is 100 ms; a loaded test machine gets ten times that.
const QUICK: Duration = Duration::from_secs(1);
/// For refusals that read the header of a real model first.
const HEADER: Duration = Duration::from_secs(5);

fn text_of(output: &std::process::Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("output is UTF-8")
}

#[test]
fn flags_lists_every_setting_and_its_origin() {
    let output = arc().args(["flags", "--burst", "3"]).env("ARC_QUEUE", "9").output().expect("the binary is built");
    let page = text_of(&output);
    assert!(output.status.success());
    for setting in arc::config::SETTINGS {
        assert!(page.lines().any(|l| l.starts_with(setting.name)), "{} is not listed", setting.name);
    }
    let line = |name: &str| page.lines().find(|l| l.starts_with(name)).expect("listed").to_owned();
    assert!(line("burst").contains(" 3 ") && line("burst").contains(" flag "));
    assert!(line("queue").contains(" 9 ") && line("queue").contains(" environment "));
    assert!(line("max_rows").contains(" default "));
}

#[test]
fn unknown_names_and_values_are_refused_in_every_layer() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let file = dir.path().join("config.toml");
    fs::write(&file, "threads = 2\nsample_onn = \"host\"\n").expect("the temporary folder is writable");
    refused(arc().arg("--config").arg(&file).arg("flags"), b"", 1, "did you mean `sample_on`?", QUICK);
    refused(arc().arg("--config").arg(dir.path().join("none")).arg("flags"), b"", 1, "cannot read", QUICK);
    refused(arc().arg("flags").env("ARC_THREDS", "2"), b"", 1, "did you mean `ARC_THREADS`?", QUICK);
    refused(arc().arg("flags").env("ARC_CAPTURE", "0"), b"", 1, "must be on or off", QUICK);
    assert!(arc().arg("flags").env("ARC_NVCC", "nvcc").output().expect("the binary is built").status.success());
    refused(arc().args(["flags", "--thredas", "2"]), b"", 2, "--threads", QUICK);
    refused(arc().args(["flags", "--capture", "0"]), b"", 2, "possible values: on, off", QUICK);
    refused(arc().args(["flags", "--burst", "65"]), b"", 1, "must be an integer from 1 to 64", QUICK);
    refused(arc().args(["flags", "--burst", "NaN"]), b"", 1, "must be an integer from 1 to 64", QUICK);
    refused(arc().args(["sevre"]), b"", 2, "serve", QUICK);
}

#[test]
fn models_that_are_not_there_are_named() {
    refused(arc().args(["run", "smollm2-135", "x"]), b"", 1, "did you mean `smollm2-135m`?", QUICK);
    refused(arc().args(["run", "./none.gguf", "x"]), b"", 1, "no such file or folder: ./none.gguf", QUICK);
    refused(arc().args(["inspect", "/nonexistent/m.gguf"]), b"", 1, "no such file", QUICK);
    refused(arc().args(["pull", "gemma"]), b"", 1, "did you mean `gemma3-270m`?", QUICK);
    refused(arc().args(["pull", "./x.gguf"]), b"", 1, "Arc knows none of this name", QUICK);
    let tiny = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny/llama/model.gguf");
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/ppl.txt");
    refused(arc().args(["eval", "ppl", tiny, text]), b"", 1, "the context is 256: lower --window", HEADER);
}

/// Files that are no models, or no longer.
#[test]
fn damaged_files_are_refused_quickly_and_in_little_memory() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let whole = fs::read(model(SMOLLM2)).expect("the model can be read");
    let write = |name: &str, bytes: &[u8]| -> PathBuf {
        let path = dir.path().join(name);
        fs::write(&path, bytes).expect("the temporary folder is writable");
        path
    };
    let mut magic = whole[..100_000].to_vec();
    magic[0] = b'X';
    let mut version = whole[..100_000].to_vec();
    version[4] = 99;
    let mut count = whole[..100_000].to_vec();
    count[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    let cases = [
        (write("empty.gguf", b""), ""),
        (write("magic.gguf", &magic), ""),
        (write("version.gguf", &version), "99"),
        (write("count.gguf", &count), ""),
        (write("header.gguf", &whole[..1000]), ""),
        (write("half.gguf", &whole[..whole.len() / 2]), ""),
        (write("short.gguf", &whole[..whole.len() - 1]), ""),
        (write("text.txt", b"hello, this is no model at all"), "neither a GGUF nor a safetensors file"),
        (dir.path().to_owned(), "no model in this folder"),
    ];
    for (path, part) in cases {
        for command in ["run", "inspect"] {
            let mut limited = std::process::Command::new("sh");
            // 64 MiB for data, in kB; the mapped file does not count.
            limited.args(["-c", "ulimit -d 65536; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_arc"), command]);
            limited.arg(&path).env("HOME", "/nonexistent");
            for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("ARC_")) {
                limited.env_remove(name);
            }
            if command == "run" {
                limited.arg("hello");
            }
            refused(&mut limited, b"", 1, part, QUICK);
        }
    }
}

#[test]
fn sampler_parameters_out_of_range_are_refused_before_anything_is_loaded() {
    let cases = [
        ("--temp", "-0.1", "temperature"),
        ("--temp", "nan", "temperature"),
        ("--temp", "inf", "temperature"),
        ("--temp", "1e39", "temperature"),
        ("--top-p", "0", "top_p"),
        ("--top-p", "1.1", "top_p"),
        ("--top-p", "nan", "top_p"),
        ("--min-p", "-1", "min_p"),
        ("--min-p", "2", "min_p"),
        ("--min-p", "inf", "min_p"),
        ("--repetition-penalty", "0", "repetition"),
        ("--repetition-penalty", "nan", "repetition"),
        ("--presence-penalty", "inf", "presence"),
        ("--frequency-penalty", "-inf", "frequency"),
        ("--stop", "", "--stop"),
    ];
    for (flag, value, part) in cases {
        // The model does not exist: what is said must be about the parameter.
        refused(arc().args(["run", "./none.gguf", "x", &format!("{flag}={value}")]), b"", 1, part, QUICK);
    }
    for (flag, value) in
        [("--temp", "hot"), ("--top-k", "-1"), ("--seed", "-1"), ("--max-tokens", "x"), ("--top-k", "1e9")]
    {
        refused(arc().args(["run", "./none.gguf", "x", flag, value]), b"", 2, "invalid value", QUICK);
    }
}

#[test]
fn prompts_that_are_no_prompts_are_refused() {
    let path = model(SMOLLM2);
    let dir = tempfile::tempdir().expect("a temporary folder");
    let file = dir.path().join("prompt.txt");
    fs::write(&file, b"abc\xff\xfedef").expect("the temporary folder is writable");
    let run = |args: &[&str]| {
        let mut command = arc();
        command.arg("run").arg(&path).args(args);
        command
    };
    refused(run(&[]).arg("-f").arg(&file), b"", 1, "is not valid UTF-8: byte 3", HEADER);
    refused(&mut run(&[]), b"\x80", 1, "standard input is not valid UTF-8: byte 0", HEADER);
    refused(&mut run(&[]), b"", 1, "standard input is empty", HEADER);
    refused(&mut run(&["-f", "/nonexistent/prompt"]), b"", 1, "cannot open /nonexistent/prompt", HEADER);
    refused(&mut run(&["x", "-f", "y"]), b"", 2, "cannot be used with", QUICK);
    let long = "word ".repeat(20_000);
    refused(&mut run(&["--raw", "--context", "2048"]), long.as_bytes(), 1, "the context is 2048", HEADER);
    refused(&mut run(&["--raw", "--context", "64", "-n", "63", "a b c"]), b"", 1, "the context is 64", HEADER);
    let endless = vec![b'a'; 17 << 20];
    refused(&mut run(&["--raw"]), &endless, 1, "is larger than", HEADER);
    refused(&mut run(&["x", "--context", "1048576"]), b"", 1, "the model was made for", HEADER);
}

#[test]
fn greedy_answers_are_the_same_every_time_and_from_every_source() {
    let path = model(SMOLLM2);
    let prompt = "Why is the sky blue?";
    let run = |args: &[&str], input: &[u8]| {
        let output = output_with(arc().arg("run").arg(&path).args(["--temp", "0", "-n", "12"]).args(args), input);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output
    };
    let first = run(&[prompt], b"");
    let text = text_of(&first);
    let word = text.split_whitespace().nth(4).expect("five words in twelve tokens").to_owned();
    let closing = String::from_utf8_lossy(&first.stderr).into_owned();
    for part in ["prefill", "decode", "tok/s", "seed"] {
        assert!(closing.contains(part), "{closing}");
    }
    assert_eq!(text_of(&run(&[], prompt.as_bytes())), text);
    assert_eq!(text_of(&run(&["-f", "-"], format!("{prompt}\n").as_bytes())), text);
    assert_eq!(text_of(&run(&["--threads", "1", "--burst", "1", prompt], b"")), text);
    assert_eq!(text_of(&run(&["--device-loop", "off", "--capture", "off", prompt], b"")), text);
    assert_eq!(text_of(&run(&["--sample-on", "host", prompt], b"")), text);

    let json = text_of(&run(&["--json", prompt], b""));
    let json: serde_json::Value = serde_json::from_str(&json).expect("one JSON object");
    assert_eq!(json["text"].as_str().map(|t| format!("{t}\n")), Some(text.clone()));
    assert!(json["prompt_tokens"].as_u64() > Some(5));
    assert!(json["decode_tokens_per_s"].as_f64() > Some(0.0));

    let stopped = text_of(&run(&["--stop", &word, prompt], b""));
    assert_eq!(Some(stopped.trim_end_matches('\n')), text.split(&word).next());
}

#[test]
fn seeds_repeat_and_differ() {
    let path = model(SMOLLM2);
    let run = |seed: &str| {
        let args = ["--raw", "--temp", "1.5", "--top-p", "1", "-n", "16", "--seed", seed, "Once upon a time"];
        let output = arc().arg("run").arg(&path).args(args).output().expect("the binary is built");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        text_of(&output)
    };
    assert_eq!(run("1"), run("1"));
    assert_ne!(run("1"), run("2"));
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let path = model(SMOLLM2);
    let mut child = arc()
        .arg("run")
        .arg(&path)
        .args(["--temp", "0", "-n", "64", "--raw", "1 2 3"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary is built");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("the child was started");
    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[test]
fn interrupt_ends_the_answer_with_its_closing_line() {
    use std::io::Read;
    let path = model(SMOLLM2);
    let mut child = arc()
        .arg("run")
        .arg(&path)
        .args(["--temp", "0", "-n", "4000", "--raw", "1 2 3 4 5 6 7 8 9"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary is built");
    let mut first = [0; 8];
    child.stdout.as_mut().expect("piped").read_exact(&mut first).expect("an answer begins");
    let kill = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(kill.expect("kill is installed").success());
    let output = child.wait_with_output().expect("the child was started");
    assert_eq!(output.status.code(), Some(130));
    assert!(String::from_utf8_lossy(&output.stderr).contains("| interrupted |"));
}

#[test]
fn chat_keeps_the_conversation_and_takes_commands() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let saved = dir.path().join("saved.json");
    let input = format!(
        "/hlep\n/help\n/stats\nMy name is Ada.\nSay my name.\n/stats\n/save {}\n/clear\n/save {}2\n/exit\nnever read\n",
        saved.display(),
        saved.display()
    );
    let mut command = arc();
    command.arg("chat").arg(model(SMOLLM2)).args(["--temp", "0", "-n", "8", "--system", "Be brief."]);
    command.env("ARC_CACHE_DIR", dir.path());
    let output = output_with(&mut command, input.as_bytes());
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{stderr}");
    for part in [
        "did you mean `/help`?",
        "/clear ",
        "nothing was answered yet",
        "| seed ",
        "saved 5 messages",
        "saved 1 messages",
    ] {
        assert!(stderr.contains(part), "{stderr:?} lacks {part:?}");
    }
    let messages: serde_json::Value =
        serde_json::from_slice(&fs::read(&saved).expect("it was saved")).expect("it is JSON");
    let roles: Vec<_> = messages.as_array().expect("a list").iter().map(|m| m["role"].clone()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
    assert_eq!(messages[1]["content"], "My name is Ada.");
}

/// Lines that a terminal delivers at once, typed ahead or pasted, are all read; `script` is the terminal.
#[test]
fn chat_reads_every_line_that_was_typed_ahead() {
    let chat = format!("{} chat '{}'", env!("CARGO_BIN_EXE_arc"), model(SMOLLM2).display());
    let dir = tempfile::tempdir().expect("a temporary folder");
    let mut terminal = std::process::Command::new("script");
    terminal.args(["-qec", &chat, "/dev/null"]).env("ARC_CACHE_DIR", dir.path()).env("TERM", "xterm");
    let output = output_with(&mut terminal, b"/one\n/two\n/three\n/exit\n");
    let page = text_of(&output);
    for name in ["one", "two", "three"] {
        assert!(page.contains(&format!("there is no /{name}")), "{name} was lost: {page}");
    }
}

#[test]
fn completions_and_manual_come_from_the_definition() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = arc().args(["completions", shell]).output().expect("the binary is built");
        assert!(text_of(&output).contains("mixed-step-ms"), "{shell}");
    }
    let output = arc().arg("man").output().expect("the binary is built");
    let page = text_of(&output);
    assert!(page.contains(".TH arc 1") && page.contains("ARC SERVE") && page.contains("mixed\\-step\\-ms"));
}

/// What is printed once and packaged names no folder of the machine that printed it.
#[test]
fn help_manual_and_completions_name_no_home() {
    for args in [["man"].as_slice(), &["completions", "fish"], &["serve", "--help"]] {
        let printed = arc().args(args).env("HOME", "/homes/somebody").output().expect("the binary is built");
        let page = text_of(&printed);
        assert!(page.contains("XDG_CACHE_HOME") && !page.contains("somebody"), "{args:?}: {page}");
    }
}

#[test]
fn inspect_shows_metadata_tensors_and_memory() {
    let output = arc().arg("inspect").arg(model(SMOLLM2)).output().expect("the binary is built");
    let page = text_of(&output);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for part in ["general.architecture = \"llama\"", "blk.*.attn_q.weight", "weights", "state", "workspace", "total"] {
        assert!(page.contains(part), "{page} lacks {part}");
    }
}

/// Safetensors without a tokenizer beside them can be described, with memory and stages, and no more.
#[test]
fn inspect_describes_a_checkpoint_without_a_tokenizer() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/deepseek-v4-tiny/native");
    let output = arc().arg("inspect").arg(&folder).arg("--step-trace").output().expect("the binary is built");
    let page = text_of(&output);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for part in ["deepseek_v4", "no tokenizer.json", "layers.*.attn.wkv.weight", "total", "stages of a decode step"] {
        assert!(page.contains(part), "{page} lacks {part}");
    }
    refused(arc().arg("run").arg(&folder).arg("hi"), b"", 1, "no tokenizer.json in this folder", HEADER);
}

/// Nobody should compare a switch with itself.
#[test]
fn settings_that_change_nothing_say_so() {
    let path = model(SMOLLM2);
    let idle = [
        (&["--gpu", "5"][..], "`gpu` changes nothing"),
        (&["--capture", "off"], "`capture` changes nothing"),
        (&["--verify-replay", "on"], "`verify_replay` changes nothing"),
        (&["--blame", "on"], "`blame` changes nothing"),
        (&["--effort-profile", "july"], "`effort_profile` changes nothing"),
    ];
    let all: Vec<&str> = idle.iter().flat_map(|(flags, _)| flags.iter().copied()).collect();
    let run = |flags: &[&str]| {
        let output = arc().arg("run").arg(&path).args(["--raw", "a", "-n", "1"]).args(flags).output();
        let output = output.expect("the binary is built");
        assert!(output.status.success());
        String::from_utf8(output.stderr).expect("UTF-8")
    };
    let log = run(&all);
    for (_, says) in idle {
        assert!(log.contains(says), "{says} is not in {log}");
    }
    assert!(!run(&[]).contains("changes nothing"));
}

#[test]
fn bench_and_eval_measure_through_the_engine() {
    let path = model(SMOLLM2);
    let json = |command: &mut std::process::Command| -> serde_json::Value {
        let output = command.output().expect("the binary is built");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("one JSON object")
    };
    let bench = ["--pp", "32", "--tg", "8", "--batch", "2", "--reps", "2", "--json"];
    let report = json(arc().arg("bench").arg(&path).args(bench));
    assert!(report["prefill"]["tokens_per_s"]["median"].as_f64() > Some(0.0));
    assert_eq!(report["decode"]["tokens_per_s"]["all"].as_array().map(Vec::len), Some(2));
    // A step reads every weight but the rows of the embedding that it does not look up.
    let bytes = report["decode"]["bytes_per_step"].as_f64().expect("a number");
    assert!((60e6..130e6).contains(&bytes), "{bytes}");
    assert!(report["read_bytes_per_s"].as_f64() > Some(1e8));
    // Behind their prompts, sequences need room for both.
    let bench = ["--pp", "96", "--tg", "8", "--reps", "1", "--warm-up", "0", "--together", "--json"];
    let report = json(arc().arg("bench").arg(&path).args(bench));
    assert_eq!(report["together"], true);
    for part in ["prefill", "decode"] {
        assert_eq!(report[part]["tokens_per_s"]["all"].as_array().map(Vec::len), Some(1), "{part}");
    }
    let wrong: [(&[&str], i32, &str); 3] = [
        (&["--together", "--batch", "2"], 1, "one sequence"),
        (&["--mixed", "--depth", "9"], 2, "cannot be used with"),
        (&["--tg", "4294967295"], 2, "is not in"),
    ];
    for (args, code, what) in wrong {
        refused(arc().arg("bench").arg(&path).args(args), b"", code, what, HEADER);
    }

    let dir = tempfile::tempdir().expect("a temporary folder");
    let text = dir.path().join("text.txt");
    fs::write(&text, "It was the best of times, it was the worst of times. ".repeat(20)).expect("it is writable");
    let eval = |args: &[&str]| json(arc().args(["eval", "ppl"]).arg(&path).arg(&text).args(args).arg("--json"));
    let report = eval(&["--window", "64", "--windows", "2"]);
    assert_eq!(report["tokens_scored"], 2 * (64 - 1 - 32));
    let perplexity = report["perplexity"].as_f64().expect("a number");
    assert!((1.0..3.0).contains(&perplexity), "a text that repeats itself is easy: {perplexity}");
    // Chunking and neighbours must not change a bit of it.
    assert_eq!(eval(&["--window", "64", "--windows", "2", "--slots", "1", "--max-rows", "7"]), report);
    refused(
        arc().args(["eval", "ppl"]).arg(&path).arg(&text).args(["--window", "4096"]),
        b"",
        1,
        "fewer than one window",
        HEADER,
    );
}

/// The committed text, the committed answer of another engine: within 0.2 %.
#[test]
fn perplexity_is_what_llama_cpp_says() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let golden = fs::read(root.join("tests/golden/ppl_smollm2.json")).expect("the golden is committed");
    let golden: serde_json::Value = serde_json::from_slice(&golden).expect("it is JSON");
    let output = arc()
        .args(["eval", "ppl", "--json"])
        .arg(model(SMOLLM2))
        .arg(root.join(golden["text"].as_str().expect("a path")))
        .output()
        .expect("the binary is built");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(report["tokens_scored"], golden["n_scored"]);
    let (ours, theirs) = (report["perplexity"].as_f64(), golden["llama_cpp"]["ppl"].as_f64());
    let (ours, theirs) = (ours.expect("a number"), theirs.expect("a number"));
    assert!((ours / theirs - 1.0).abs() < 0.002, "{ours} against {theirs}");
}
