//! One typed configuration, resolved once at start: defaults < file < `ARC_*` environment < flags.
//!
//! Every setting is declared once, in the table below. The declaration gives the field of [`Config`], the flag, the
//! environment name, the key of the configuration file, the range and the help text, so none of them can drift. An unknown
//! name or a value outside its range is an error in every layer, with the nearest choices; nothing is ever ignored.

pub mod layers;
pub mod value;

use std::{net::IpAddr, path::PathBuf};

use arc_engine::model::deepseek_v4::Numerics;

pub use layers::{ConfigError, Resolved, Source};
pub use value::{Auto, AutoOff, Device, EffortProfile, Kind, LogFormat, LogLevel, SampleOn, Switch};

/// Which commands take a setting as a flag. The file and the environment may always name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Every command.
    Global,
    /// Commands that run a model.
    Engine,
    /// `arc serve`.
    Server,
}

/// What is known of a setting beside its value.
#[derive(Debug)]
pub struct Setting {
    /// Name of the field, and of the key in the configuration file.
    pub name: &'static str,
    /// Who takes it as a flag.
    pub scope: Scope,
    /// What may be written.
    pub kind: Kind,
    /// What it does, in a sentence.
    pub doc: &'static str,
}

impl Setting {
    /// `max_rows` -> `max-rows`.
    pub fn flag(&self) -> String {
        self.name.replace('_', "-")
    }

    /// `max_rows` -> `ARC_MAX_ROWS`.
    pub fn env(&self) -> String {
        format!("ARC_{}", self.name.to_uppercase())
    }
}

macro_rules! settings {
    ($($scope:ident: $(#[doc = $doc:literal])+ $name:ident: $type:ty = $default:expr, $kind:expr;)+) => {
        /// Every setting, resolved. See [`SETTINGS`] for names, ranges and help.
        #[derive(Debug, Clone, PartialEq)]
        pub struct Config {
            $($(#[doc = $doc])+ pub $name: $type,)+
        }

        impl Default for Config {
            fn default() -> Self {
                Config { $($name: $default,)+ }
            }
        }

        /// The table of settings, in the order of `arc flags`.
        pub static SETTINGS: &[Setting] = &[
            $(Setting { name: stringify!($name), scope: Scope::$scope, kind: $kind, doc: concat!($($doc),+) },)+
        ];

        impl Config {
            /// Sets one field from text. Errors: the text is not what `kind` allows, said without the name of the setting.
            ///
            /// Panics if `name` is not in [`SETTINGS`]: callers look it up first.
            fn set(&mut self, name: &str, text: &str) -> Result<(), String> {
                match name {
                    $(stringify!($name) => {
                        self.$name = value::Value::parse(text, &$kind)?;
                        Ok(())
                    })+
                    _ => unreachable!("setting {name} is not in the table"),
                }
            }

            /// The value as it would be written in the configuration file, without quotes.
            pub fn show(&self, name: &str) -> Option<String> {
                match name {
                    $(stringify!($name) => Some(value::Value::show(&self.$name)),)+
                    _ => None,
                }
            }
        }
    };
}

settings! {
    Global: /// Folder of models, history and locks; unless set, arc in $XDG_CACHE_HOME or in ~/.cache
    cache_dir: PathBuf = layers::default_cache_dir(), Kind::Path;
    Global: /// Base address of the model hub, the last source that is asked
    hub: String = "https://huggingface.co".to_owned(), Kind::Text;
    Global: /// Least severe event that is logged to stderr
    log: LogLevel = LogLevel::Warn, Kind::Choice(LogLevel::CHOICES);
    Global: /// Shape of a log line
    log_format: LogFormat = LogFormat::Text, Kind::Choice(LogFormat::CHOICES);
    Global: /// Progress bars on long work, where stderr is a terminal
    progress: Switch = Switch::On, Kind::Choice(Switch::CHOICES);

    Engine: /// Where the model runs
    device: Device = Device::Cpu, Kind::Choice(Device::CHOICES);
    Engine: /// Which GPU, in the driver's count from 0
    gpu: u32 = 0, Kind::Int(0, 63);
    Engine: /// Threads of the CPU team; auto: one for each core
    threads: Auto = Auto::Auto, Kind::AutoInt(1, 1024);
    Engine: /// Arithmetic of a model that has a choice (DeepSeek-V4); every other model has serving only
    numerics: Numerics = Numerics::Serving, Kind::Choice(&value::NUMERICS);
    Engine: /// Words in which DeepSeek-V4 is asked for more reasoning: the preview's, or those since July 2026; auto: as the model's configuration tells
    effort_profile: EffortProfile = EffortProfile::Auto, Kind::Choice(EffortProfile::CHOICES);
    Engine: /// Longest sequence in tokens, prompt and output together; auto: the model's, at most 8192, for bench what it measures
    context: Auto = Auto::Auto, Kind::AutoInt(16, 1 << 20);
    Engine: /// Sequences that run at once; auto: 1 for run, chat and eval logits, 4 for eval ppl, 16 for serve and inspect, what was asked for bench
    slots: Auto = Auto::Auto, Kind::AutoInt(1, 256);
    Engine: /// Tokens that the KV pool holds; auto: four contexts, or slots contexts where that is less; for bench what it measures
    kv_tokens: Auto = Auto::Auto, Kind::AutoInt(16, 1 << 30);
    Engine: /// Rows of the largest step; auto: 2048 on the CUDA device, 512 on the CPU
    max_rows: Auto = Auto::Auto, Kind::AutoInt(1, 4096);
    Engine: /// Rows of a step that go through the output head; auto: twice the slots or one for each draft, at least 8; 128 for eval ppl, --chunk for eval logits
    heads: Auto = Auto::Auto, Kind::AutoInt(1, 4096);
    Engine: /// Decode steps that the device runs ahead of the host
    burst: u32 = 8, Kind::Int(1, 64);
    Engine: /// Longest step in milliseconds while rows decode; it bounds the prefill chunk that joins them
    mixed_step_ms: u32 = 50, Kind::Int(1, 10_000);
    Engine: /// Requests that may wait; the next one is told to come back (429)
    queue: u32 = 256, Kind::Int(1, 65_536);
    Engine: /// Output tokens of a request that names no limit, where they fit
    default_max_tokens: u32 = 8192, Kind::Int(1, 1 << 20);
    Engine: /// Record steps once and replay them
    capture: Switch = Switch::On, Kind::Choice(Switch::CHOICES);
    Engine: /// Run every recorded step eagerly too and compare all that it leaves, bit for bit; off: before serving, those of one row
    verify_replay: Switch = Switch::Off, Kind::Choice(Switch::CHOICES);
    Engine: /// Wait for the GPU behind every kernel, so that a fault names the one that it came in
    blame: Switch = Switch::Off, Kind::Choice(Switch::CHOICES);
    Engine: /// Let the device run a burst of steps by itself
    device_loop: Switch = Switch::On, Kind::Choice(Switch::CHOICES);
    Engine: /// Where tokens are drawn
    sample_on: SampleOn = SampleOn::Device, Kind::Choice(SampleOn::CHOICES);
    Engine: /// Keep what a request has left until its room is needed: one whose prompt begins with it goes on from there
    prefix_cache: Switch = Switch::On, Kind::Choice(Switch::CHOICES);
    Engine: /// Tokens a step that a model's draft block proposes and the model checks; auto: as many as pay
    speculate: AutoOff = AutoOff::Auto, Kind::AutoOffInt(1, 4);

    Server: /// Address to listen on
    host: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), Kind::Address;
    Server: /// Port to listen on; 0: any free one
    port: u32 = 8080, Kind::Int(0, 65_535);
    Server: /// Name of the model in the API; auto: that of its file or folder
    served_name: String = "auto".to_owned(), Kind::Text;
    Server: /// Name of the model's card on the Hugging Face hub, for the list of models; none: it has none
    hugging_face_id: String = "none".to_owned(), Kind::Text;
    Server: /// Dollars a prompt token, for the list of models
    price_prompt: String = "0".to_owned(), Kind::Text;
    Server: /// Dollars an output token, for the list of models
    price_completion: String = "0".to_owned(), Kind::Text;
    Server: /// Largest request body in KiB
    body_limit_kib: u32 = 8192, Kind::Int(1, 1 << 20);
    Server: /// Connections that may be open; more wait
    connections: u32 = 1024, Kind::Int(1, 65_536);
    Server: /// Seconds that a client has for the head of its request, for the body, and to take some of what it is sent
    read_timeout_s: u32 = 30, Kind::Int(1, 3600);
    Server: /// Seconds that a request may take in all, waiting included
    request_timeout_s: u32 = 600, Kind::Int(1, 86_400);
    Server: /// Seconds that running requests have to end after SIGTERM or SIGINT
    drain_s: u32 = 30, Kind::Int(0, 3600);
    Server: /// Most choices (n) of one request, over all its prompts; as many as the queue holds at most
    max_choices: u32 = 16, Kind::Int(1, 256);
}

impl Config {
    /// The same with one setting changed, as `name=value`. Errors: a sentence, which names the choices.
    pub fn with(&self, assignment: &str) -> Result<Config, String> {
        let Some((name, text)) = assignment.split_once('=') else {
            return Err(format!("`{assignment}` is not SETTING=VALUE"));
        };
        // As a flag is written, or as the file has it.
        let name = name.trim().replace('-', "_");
        if setting(&name).is_none() {
            let known = SETTINGS.iter().map(|s| s.name);
            return Err(format!("there is no setting `{name}`{}", suggestion(&name, known)));
        }
        let mut config = self.clone();
        config.set(&name, text.trim()).map_err(|why| format!("`{name}` is \"{}\", {why}", text.trim()))?;
        Ok(config)
    }
}

/// The setting of that name.
pub fn setting(name: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|s| s.name == name)
}

/// The known names nearest to `name`, best first, at most three; none that are far from it.
///
/// Distance is Damerau-Levenshtein, and a candidate may differ in half of its letters; a name that begins like the unknown
/// one counts as near.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let name = name.to_lowercase();
    let mut near: Vec<(usize, &str)> = known
        .into_iter()
        .map(|k| (strsim::damerau_levenshtein(&name, &k.to_lowercase()), k))
        .filter(|(d, k)| *d <= k.chars().count().div_ceil(2) || (name.len() >= 3 && k.starts_with(name.as_str())))
        .collect();
    near.sort();
    let best = near.first().map_or(0, |n| n.0);
    near.into_iter().filter(|(d, _)| *d <= best + 1).take(3).map(|(_, k)| k).collect()
}

/// "; did you mean `a` or `b`?", or the whole list where nothing is near and the list is short.
pub fn suggestion<'a>(name: &str, known: impl IntoIterator<Item = &'a str> + Clone) -> String {
    let quote = |names: &[&str]| names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>();
    let near = nearest(name, known.clone());
    if !near.is_empty() {
        return format!("; did you mean {}?", quote(&near).join(" or "));
    }
    let all: Vec<&str> = known.into_iter().collect();
    if all.len() <= 12 { format!("; known are {}", quote(&all).join(", ")) } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_inside_their_own_ranges() {
        let config = Config::default();
        for s in SETTINGS {
            let text = config.show(s.name).expect("listed settings can be shown");
            let mut copy = config.clone();
            copy.set(s.name, &text).unwrap_or_else(|e| panic!("default of {} is refused: {e}", s.name));
            assert_eq!(copy, config, "{} does not survive being written and read", s.name);
            assert!(!s.doc.trim().is_empty());
        }
    }

    #[test]
    fn one_setting_is_changed_by_name() {
        let config = Config::default();
        assert_eq!(config.with("burst = 3"), Ok(Config { burst: 3, ..config.clone() }));
        assert_eq!(config.with("sample-on=host"), Ok(Config { sample_on: SampleOn::Host, ..config.clone() }));
        for (wrong, says) in [
            ("burst", "`burst` is not SETTING=VALUE"),
            ("burts=3", "there is no setting `burts`; did you mean `burst`?"),
            ("burst=0", "`burst` is \"0\", must be"),
            ("sample_on=cpu", "`sample_on` is \"cpu\", must be device or host"),
        ] {
            let why = config.with(wrong).expect_err(wrong);
            assert!(why.starts_with(says), "{wrong}: {why}");
        }
    }

    #[test]
    fn nearest_finds_typos_and_not_strangers() {
        let names: Vec<&str> = SETTINGS.iter().map(|s| s.name).collect();
        assert_eq!(nearest("burts", names.iter().copied())[0], "burst");
        assert_eq!(nearest("max_row", names.iter().copied())[0], "max_rows");
        assert_eq!(nearest("device_lop", names.iter().copied())[0], "device_loop");
        assert!(nearest("xyzzyxyzzyxyzzy", names.iter().copied()).is_empty());
    }
}
