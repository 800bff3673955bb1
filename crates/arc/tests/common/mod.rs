//! What the tests of the `arc` binary share. Each test file uses a part of it.
#![allow(dead_code)]

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

/// SmolLM2-135M-Instruct.
pub const SMOLLM2: &str = "smollm2-135m-instruct-q4_1.gguf";

/// A real model, from `ARC_TEST_MODELS` or the cache. Fails with the way to get it when it is absent.
pub fn model(file: &str) -> PathBuf {
    let folder = std::env::var_os("ARC_TEST_MODELS").map(PathBuf::from);
    let folder = folder.or_else(|| Some(std::env::home_dir()?.join(".cache/arc/models"))).expect("a home folder");
    let path = folder.join(file);
    assert!(path.is_file(), "{} is missing: run `arc pull`, or set ARC_TEST_MODELS to its folder", path.display());
    path
}

/// The binary, with no settings from this machine but its own.
pub fn arc() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_arc"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("ARC_")) {
        command.env_remove(name);
    }
    command.env("HOME", "/nonexistent").env_remove("XDG_CONFIG_HOME").env_remove("XDG_CACHE_HOME");
    command
}

/// Runs to the end, with `input` on standard input.
pub fn output_with(command: &mut Command, input: &[u8]) -> Output {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary is built");
    // A child that has seen enough closes its end; that is its right.
    let _ = child.stdin.take().expect("piped").write_all(input);
    child.wait_with_output().expect("the child was started")
}

/// Checks that a command was refused: this exit code, nothing on standard output, one line on standard error that holds
/// `part`, within `within`.
pub fn refused(command: &mut Command, input: &[u8], code: i32, part: &str, within: Duration) {
    let start = Instant::now();
    let output = output_with(command, input);
    let took = start.elapsed();
    let stderr = String::from_utf8(output.stderr).expect("messages are UTF-8");
    assert_eq!(output.status.code(), Some(code), "{command:?}: {stderr}");
    assert!(output.stdout.is_empty(), "{command:?} wrote {:?}", String::from_utf8_lossy(&output.stdout));
    assert!(stderr.contains(part), "{command:?}: {stderr:?} lacks {part:?}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    if code == 1 {
        assert_eq!(stderr.lines().count(), 1, "{command:?}: one sentence, not {stderr:?}");
    }
    assert!(took < within, "{command:?} took {took:?}");
}

/// A running `arc serve`, ended when it is dropped.
pub struct Server {
    pub child: Child,
    pub address: String,
}

impl Server {
    /// Starts it on a free port and waits until it listens.
    pub fn start(model: &Path, args: &[&str]) -> Server {
        let mut child = arc()
            .arg("serve")
            .arg(model)
            .args(["--port", "0"])
            .args(args)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary is built");
        let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
        let mut seen = String::new();
        let address = loop {
            let Some(Ok(line)) = lines.next() else { panic!("the server ended before it listened: {seen}") };
            if let Some((_, address)) = line.split_once(" is served on http://") {
                break address.to_owned();
            }
            seen.push_str(&line);
        };
        // Somebody must read on, or the server would block on a full pipe.
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| eprintln!("server: {line}")));
        Server { child, address }
    }

    /// Sends a signal by name.
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status();
        assert!(status.expect("kill is installed").success());
    }

    /// One request on a connection of its own; returns status and body.
    pub fn request(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut stream = self.send(method, path, body);
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("the server answers");
        let answer = String::from_utf8(answer).expect("answers are UTF-8");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
        let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).expect("a status line");
        (status, body.to_owned())
    }

    /// Sends a request and leaves the answer to the caller.
    pub fn send(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("the server listens");
        stream.set_read_timeout(Some(Duration::from_secs(120))).expect("a timeout above zero");
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
            self.address,
            body.len()
        );
        stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes())).expect("the server reads");
        stream
    }

    /// The value of a series without labels.
    pub fn metric(&self, name: &str) -> f64 {
        let (status, page) = self.request("GET", "/metrics", "");
        assert_eq!(status, 200);
        let line = page.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|v| v.parse().ok()).unwrap_or_else(|| panic!("no {name} in {page}"))
    }

    /// Waits until a series has a value that will do.
    pub fn wait_for(&self, name: &str, good: impl Fn(f64) -> bool) -> f64 {
        let start = Instant::now();
        loop {
            let value = self.metric(name);
            if good(value) {
                return value;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "{name} stays at {value}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A Python that has the `openai` package: `ARC_TEST_PYTHON`, or the virtual environment of the test set-up.
pub fn python() -> PathBuf {
    if let Some(path) = std::env::var_os("ARC_TEST_PYTHON") {
        return PathBuf::from(path);
    }
    let venv = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/bin/python");
    if venv.exists() { venv } else { PathBuf::from("python3") }
}
