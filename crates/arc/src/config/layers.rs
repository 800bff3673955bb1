//! The layers of the configuration, and which of them had the last word.

use std::{
    collections::BTreeMap,
    env,
    ffi::OsString,
    fmt,
    path::{Path, PathBuf},
};

use super::{Config, SETTINGS, setting, suggestion};

/// `ARC_*` names that are not settings: the configuration file, what the build and the CUDA device are told, and
/// what tests need.
const OTHER_ENV: [&str; 9] = [
    "ARC_CONFIG",
    "ARC_CUDA_ARCHS",
    "ARC_CUDA_SANITIZE",
    "ARC_CUDA_TRACE",
    "ARC_CUDA_TRAP_SEED",
    "ARC_NVCC",
    "ARC_TEST_MODELS",
    "ARC_TEST_PYTHON",
    "ARC_UPDATE_GOLDEN",
];

/// Largest configuration file in bytes; a real one has a few hundred.
const FILE_MAX: u64 = 1 << 20;

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Nobody said anything.
    Default,
    /// The configuration file, with the line.
    File(PathBuf, usize),
    /// The environment.
    Env,
    /// The command line.
    Flag,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Default => f.write_str("default"),
            Source::File(path, line) => write!(f, "{}:{line}", path.display()),
            Source::Env => f.write_str("environment"),
            Source::Flag => f.write_str("flag"),
        }
    }
}

/// Why the configuration was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {path}: {error}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{path}:{line}: not valid TOML: {message}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What the parser said.
        message: String,
    },
    /// A table of the configuration file.
    #[error("{}:{line}: `{name}` is a table, but every setting stands by itself: write `name = value` outside of any table", path.display())]
    Table {
        /// The file.
        path: PathBuf,
        /// Its line.
        line: usize,
        /// The table.
        name: String,
    },
    /// A name that is no setting.
    #[error("unknown setting `{name}` ({origin}){suggestion}")]
    UnknownName {
        /// The name.
        name: String,
        /// Where it was written.
        origin: String,
        /// The nearest choices.
        suggestion: String,
    },
    /// A value that the setting does not take.
    #[error("`{name}` is \"{text}\" ({origin}), {want}")]
    BadValue {
        /// The setting.
        name: &'static str,
        /// The value.
        text: String,
        /// Where it was written.
        origin: String,
        /// What it must be.
        want: String,
    },
}

/// The configuration and where each value came from.
#[derive(Debug, Clone)]
pub struct Resolved {
    /// The values.
    pub config: Config,
    sources: BTreeMap<&'static str, Source>,
}

/// What the layers are read from; [`Inputs::from_process`] outside tests.
#[derive(Debug, Default)]
pub struct Inputs {
    /// `--config FILE`.
    pub file: Option<PathBuf>,
    /// Environment variables.
    pub env: Vec<(OsString, OsString)>,
    /// Settings given as flags: name and text.
    pub flags: Vec<(String, String)>,
}

impl Inputs {
    /// The environment of this process, with what the command line said.
    pub fn from_process(file: Option<PathBuf>, flags: Vec<(String, String)>) -> Inputs {
        Inputs { file, env: env::vars_os().collect(), flags }
    }
}

impl Resolved {
    /// Resolves all layers. Errors: see [`ConfigError`]; the first one found, lower layers first.
    pub fn new(inputs: &Inputs) -> Result<Resolved, ConfigError> {
        let mut resolved = Resolved { config: Config::default(), sources: BTreeMap::new() };
        if let Some((path, required)) = config_file(inputs) {
            resolved.read_file(&path, required)?;
        }
        resolved.read_env(&inputs.env)?;
        for (name, text) in &inputs.flags {
            resolved.set(name, text, Source::Flag, || format!("from --{}", name.replace('_', "-")))?;
        }
        Ok(resolved)
    }

    /// Where the value of a setting came from.
    pub fn source(&self, name: &str) -> &Source {
        self.sources.get(name).unwrap_or(&Source::Default)
    }

    fn read_file(&mut self, path: &Path, required: bool) -> Result<(), ConfigError> {
        let unreadable = |error| ConfigError::Unreadable { path: path.to_owned(), error };
        let text = match read_bounded(path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && !required => return Ok(()),
            Err(e) => return Err(unreadable(e)),
        };
        let line_of =
            |offset: usize| text.as_bytes()[..offset.min(text.len())].iter().filter(|b| **b == b'\n').count() + 1;
        let table = toml::de::DeTable::parse(&text).map_err(|e| ConfigError::Syntax {
            path: path.to_owned(),
            line: line_of(e.span().map_or(0, |s| s.start)),
            message: e.message().to_owned(),
        })?;
        // In the order of the file, so that the first error is the first line.
        let mut entries: Vec<_> = table.get_ref().iter().collect();
        entries.sort_by_key(|(key, _)| key.span().start);
        for (key, value) in entries {
            let line = line_of(key.span().start);
            let text = match value.get_ref() {
                toml::de::DeValue::String(s) => s.to_string(),
                toml::de::DeValue::Integer(n) => n.to_string(),
                toml::de::DeValue::Boolean(b) => if *b { "on" } else { "off" }.to_owned(),
                toml::de::DeValue::Table(_) => {
                    let (path, name) = (path.to_owned(), key.get_ref().to_string());
                    return Err(ConfigError::Table { path, line, name });
                }
                // As it is written.
                _ => text[value.span()].to_owned(),
            };
            let origin = || format!("{}:{line}", path.display());
            self.set(key.get_ref(), &text, Source::File(path.to_owned(), line), origin)?;
        }
        Ok(())
    }

    fn read_env(&mut self, env: &[(OsString, OsString)]) -> Result<(), ConfigError> {
        let mut vars: Vec<_> = env.iter().filter(|(name, _)| name.to_string_lossy().starts_with("ARC_")).collect();
        vars.sort();
        for (name, text) in vars {
            let (name, text) = (name.to_string_lossy(), text.to_string_lossy());
            if OTHER_ENV.contains(&name.as_ref()) {
                continue;
            }
            let Some(setting) = SETTINGS.iter().find(|s| s.env() == *name) else {
                let known: Vec<String> = SETTINGS.iter().map(|s| s.env()).chain(OTHER_ENV.map(str::to_owned)).collect();
                return Err(ConfigError::UnknownName {
                    name: name.to_string(),
                    origin: "environment".to_owned(),
                    suggestion: suggestion(&name, known.iter().map(String::as_str)),
                });
            };
            self.set(setting.name, &text, Source::Env, || format!("from {name}"))?;
        }
        Ok(())
    }

    fn set(&mut self, name: &str, text: &str, source: Source, origin: impl Fn() -> String) -> Result<(), ConfigError> {
        let Some(setting) = setting(name) else {
            return Err(ConfigError::UnknownName {
                name: name.to_owned(),
                origin: origin(),
                suggestion: suggestion(name, SETTINGS.iter().map(|s| s.name)),
            });
        };
        self.config.set(setting.name, text).map_err(|want| ConfigError::BadValue {
            name: setting.name,
            text: text.chars().take(100).collect(),
            origin: origin(),
            want,
        })?;
        self.sources.insert(setting.name, source);
        Ok(())
    }
}

/// The file to read, and whether it must exist: `--config`, then `ARC_CONFIG`, then the user's own if it is there.
fn config_file(inputs: &Inputs) -> Option<(PathBuf, bool)> {
    let var = |name: &str| inputs.env.iter().find(|(n, v)| n == name && !v.is_empty()).map(|(_, v)| PathBuf::from(v));
    if let Some(path) = inputs.file.clone().or_else(|| var("ARC_CONFIG")) {
        return Some((path, true));
    }
    let base = var("XDG_CONFIG_HOME").or_else(|| var("HOME").map(|home| home.join(".config")))?;
    Some((base.join("arc/config.toml"), false))
}

fn read_bounded(path: &Path) -> std::io::Result<String> {
    let len = std::fs::metadata(path)?.len();
    if len > FILE_MAX {
        return Err(std::io::Error::other(format!("it has {len} bytes, more than {FILE_MAX}")));
    }
    std::fs::read_to_string(path)
}

pub(super) fn home_dir() -> Option<PathBuf> {
    env::var_os("HOME").filter(|h| !h.is_empty()).map(PathBuf::from)
}

/// `$XDG_CACHE_HOME/arc` or `~/.cache/arc`; without a home, a folder in the current one.
pub(super) fn default_cache_dir() -> PathBuf {
    env::var_os("XDG_CACHE_HOME")
        .filter(|d| !d.is_empty())
        .map(PathBuf::from)
        .or_else(|| home_dir().map(|h| h.join(".cache")))
        .map_or_else(|| PathBuf::from(".arc-cache"), |d| d.join("arc"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(pairs: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
        pairs.iter().map(|(k, v)| (OsString::from(k), OsString::from(v))).collect()
    }

    fn with_file(text: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let path = dir.path().join("config.toml");
        std::fs::write(&path, text).expect("the temporary folder is writable");
        (dir, path)
    }

    #[test]
    fn later_layers_win_and_say_so() {
        let (_dir, path) = with_file("burst = 2\nqueue = 7\nport = 9000\n");
        let resolved = Resolved::new(&Inputs {
            file: Some(path.clone()),
            env: env(&[("ARC_QUEUE", "8"), ("ARC_PORT", "9001"), ("HOME", "/nowhere")]),
            flags: vec![("port".into(), "9002".into())],
        })
        .expect("all values are good");
        let c = &resolved.config;
        assert_eq!((c.burst, c.queue, c.port, c.default_max_tokens), (2, 8, 9002, 8192));
        assert_eq!(*resolved.source("burst"), Source::File(path, 1));
        assert_eq!(*resolved.source("queue"), Source::Env);
        assert_eq!(*resolved.source("port"), Source::Flag);
        assert_eq!(*resolved.source("default_max_tokens"), Source::Default);
    }

    #[test]
    fn every_layer_refuses_unknown_names_and_bad_values() {
        let message = |file: Option<&str>, vars: &[(&str, &str)], flags: &[(&str, &str)]| {
            let dir = file.map(with_file);
            let inputs = Inputs {
                file: dir.as_ref().map(|d| d.1.clone()),
                env: env(vars),
                flags: flags.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect(),
            };
            Resolved::new(&inputs).expect_err("must be refused").to_string()
        };
        let cases = [
            (message(Some("port = 1\nburts = 2"), &[], &[]), "config.toml:2"),
            (message(Some("burts = 2"), &[], &[]), "did you mean `burst`?"),
            (message(Some("capture = 0"), &[], &[]), "must be on or off"),
            (message(Some("burst = true"), &[], &[]), "must be an integer"),
            (message(Some("burst = 0"), &[], &[]), "must be an integer from 1 to 64"),
            (message(Some("burst = [1]"), &[], &[]), "`burst` is \"[1]\""),
            (message(Some("burst = 2.5"), &[], &[]), "`burst` is \"2.5\""),
            (message(Some("port = 1\n[engine]\nburst = 2"), &[], &[]), "config.toml:2: `engine` is a table"),
            (message(Some("burst = "), &[], &[]), "not valid TOML"),
            (message(Some("burst = 1\nburst = 2"), &[], &[]), "duplicate key"),
            (message(None, &[("ARC_BURTS", "2")], &[]), "did you mean `ARC_BURST`?"),
            (message(None, &[("ARC_CAPTURE", "1")], &[]), "`capture` is \"1\" (from ARC_CAPTURE), must be on or off"),
            (message(None, &[("ARC_SAMPLE_ON", "hots")], &[]), "did you mean `host`?"),
            (message(Some("numerics = \"exact\""), &[], &[]), "reference or simulated or simulated-full or serving"),
            (message(None, &[("ARC_NUMERICS", "severing")], &[]), "did you mean `serving`?"),
            (message(None, &[("ARC_CONFIG", "/no/such/file")], &[]), "cannot read the configuration file"),
            (
                message(None, &[], &[("max_rows", "NaN")]),
                "(from --max-rows), must be auto or an integer from 1 to 4096",
            ),
            (message(None, &[], &[("threads", "-1")]), "must be auto or an integer"),
            (message(None, &[], &[("host", "example")]), "must be an IP address"),
        ];
        for (got, want) in cases {
            let want = want.replace("array value", "an array");
            assert!(
                got.contains(&want) || got.contains(&want.replace("an array", "array value")),
                "{got:?} lacks {want:?}"
            );
        }
    }

    #[test]
    fn documented_other_variables_are_allowed_and_a_missing_user_file_too() {
        let inputs = Inputs { env: env(&[("ARC_TEST_MODELS", "/m"), ("HOME", "/nowhere")]), ..Inputs::default() };
        Resolved::new(&inputs).expect("nothing is wrong");
    }
}
