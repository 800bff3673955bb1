//! What a setting may hold, and how its text is read.

use std::{fmt, net::IpAddr, path::PathBuf};

use arc_engine::model::deepseek_v4::Numerics;

use super::suggestion;

/// What may be written for a setting. Ranges are inclusive.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// An integer.
    Int(u64, u64),
    /// An integer or `auto`.
    AutoInt(u64, u64),
    /// An integer, `auto` or `off`.
    AutoOffInt(u64, u64),
    /// One of these words.
    Choice(&'static [&'static str]),
    /// An IP address.
    Address,
    /// A path; `~/` is the home folder.
    Path,
    /// Any text that is not empty.
    Text,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Int(min, max) => write!(f, "{min}..{max}"),
            Kind::AutoInt(min, max) => write!(f, "auto|{min}..{max}"),
            Kind::AutoOffInt(min, max) => write!(f, "auto|off|{min}..{max}"),
            Kind::Choice(words) => f.write_str(&words.join("|")),
            Kind::Address => f.write_str("IP address"),
            Kind::Path => f.write_str("path"),
            Kind::Text => f.write_str("text"),
        }
    }
}

/// The type of a field of [`super::Config`].
pub(super) trait Value: Sized {
    /// Reads the text. Errors: what it must be, as the end of the sentence "`name` is "text", ...".
    fn parse(text: &str, kind: &Kind) -> Result<Self, String>;
    /// The text that `parse` reads back.
    fn show(&self) -> String;
}

/// An integer, or left to the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Auto {
    /// Chosen where the facts are known.
    Auto,
    /// As written.
    Value(u32),
}

impl Auto {
    /// The written value.
    pub fn value(self) -> Option<u32> {
        match self {
            Auto::Auto => None,
            Auto::Value(n) => Some(n),
        }
    }
}

/// An integer, left to the program, or nothing at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AutoOff {
    /// Chosen where the facts are known.
    Auto,
    /// Not in use.
    Off,
    /// As written.
    Value(u32),
}

macro_rules! choice {
    ($(#[doc = $doc:literal])+ $name:ident { $($(#[doc = $vdoc:literal])+ $variant:ident = $word:literal,)+ }) => {
        $(#[doc = $doc])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name { $($(#[doc = $vdoc])+ $variant,)+ }

        impl $name {
            /// The words of the variants, in order.
            pub const CHOICES: &'static [&'static str] = &[$($word),+];

            /// The word of this variant.
            pub fn word(self) -> &'static str {
                match self { $($name::$variant => $word,)+ }
            }
        }

        impl Value for $name {
            fn parse(text: &str, _: &Kind) -> Result<Self, String> {
                match text {
                    $($word => Ok($name::$variant),)+
                    _ => Err(format!("must be {}{}", Self::CHOICES.join(" or "), suggestion_for(text, Self::CHOICES))),
                }
            }

            fn show(&self) -> String {
                self.word().to_owned()
            }
        }
    };
}

choice! {
    /// A mechanism that can be turned off to be compared.
    Switch {
        /// In use.
        On = "on",
        /// Not in use.
        Off = "off",
    }
}

choice! {
    /// Where the model runs.
    Device {
        /// On the processor.
        Cpu = "cpu",
        /// On an NVIDIA GPU.
        Cuda = "cuda",
    }
}

choice! {
    /// Where tokens are drawn.
    SampleOn {
        /// Where the logits are.
        Device = "device",
        /// On the host, one row at a time.
        Host = "host",
    }
}

choice! {
    /// In which words DeepSeek-V4 is asked for more reasoning.
    EffortProfile {
        /// Those of its release, as far as its configuration tells.
        Auto = "auto",
        /// Those of April 2026.
        Preview = "preview",
        /// Those since July 2026.
        July = "july",
    }
}

choice! {
    /// Severity of log events.
    LogLevel {
        /// A request or a device is lost.
        Error = "error",
        /// Something the operator may change.
        Warn = "warn",
        /// What an operator wants on a quiet day.
        Info = "info",
        /// For finding a fault.
        Debug = "debug",
        /// Everything, tokens included.
        Trace = "trace",
    }
}

choice! {
    /// Shape of a log line.
    LogFormat {
        /// For people.
        Text = "text",
        /// One JSON object a line.
        Json = "json",
    }
}

/// The words of [`Numerics`].
pub(super) static NUMERICS: [&str; Numerics::ALL.len()] = {
    let mut words = [""; Numerics::ALL.len()];
    let mut i = 0;
    while i < words.len() {
        words[i] = Numerics::ALL[i].name();
        i += 1;
    }
    words
};

impl Value for Numerics {
    fn parse(text: &str, _: &Kind) -> Result<Self, String> {
        let problem = || format!("must be {}{}", NUMERICS.join(" or "), suggestion_for(text, &NUMERICS));
        Numerics::from_name(text).ok_or_else(problem)
    }

    fn show(&self) -> String {
        self.name().to_owned()
    }
}

impl Switch {
    /// Whether it is on.
    pub fn is_on(self) -> bool {
        self == Switch::On
    }
}

fn suggestion_for(text: &str, choices: &'static [&'static str]) -> String {
    if super::nearest(text, choices.iter().copied()).is_empty() {
        String::new()
    } else {
        suggestion(text, choices.iter().copied())
    }
}

impl Value for u32 {
    fn parse(text: &str, kind: &Kind) -> Result<Self, String> {
        let &Kind::Int(min, max) = kind else { unreachable!("an integer setting has kind Int, not {kind:?}") };
        match text.parse::<u64>() {
            Ok(n) if (min..=max).contains(&n) => Ok(u32::try_from(n).expect("ranges end below 2^32")),
            _ => Err(format!("must be an integer from {min} to {max}")),
        }
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Value for Auto {
    fn parse(text: &str, kind: &Kind) -> Result<Self, String> {
        let &Kind::AutoInt(min, max) = kind else { unreachable!("an auto setting has kind AutoInt, not {kind:?}") };
        if text == "auto" {
            return Ok(Auto::Auto);
        }
        u32::parse(text, &Kind::Int(min, max))
            .map(Auto::Value)
            .map_err(|_| format!("must be auto or an integer from {min} to {max}"))
    }

    fn show(&self) -> String {
        self.value().map_or_else(|| "auto".to_owned(), |n| n.to_string())
    }
}

impl Value for AutoOff {
    fn parse(text: &str, kind: &Kind) -> Result<Self, String> {
        let &Kind::AutoOffInt(min, max) = kind else {
            unreachable!("such a setting has kind AutoOffInt, not {kind:?}")
        };
        match text {
            "auto" => Ok(AutoOff::Auto),
            "off" => Ok(AutoOff::Off),
            _ => u32::parse(text, &Kind::Int(min, max))
                .map(AutoOff::Value)
                .map_err(|_| format!("must be auto, off or an integer from {min} to {max}")),
        }
    }

    fn show(&self) -> String {
        match self {
            AutoOff::Auto => "auto".to_owned(),
            AutoOff::Off => "off".to_owned(),
            AutoOff::Value(n) => n.to_string(),
        }
    }
}

impl Value for IpAddr {
    fn parse(text: &str, _: &Kind) -> Result<Self, String> {
        let text = if text == "localhost" { "127.0.0.1" } else { text };
        text.parse().map_err(|_| "must be an IP address, for example 127.0.0.1 or 0.0.0.0".to_owned())
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Value for PathBuf {
    fn parse(text: &str, _: &Kind) -> Result<Self, String> {
        if text.is_empty() {
            return Err("must be a path".to_owned());
        }
        match text.strip_prefix("~/") {
            Some(rest) => {
                Ok(super::layers::home_dir().ok_or("needs a home folder for ~, but HOME is not set")?.join(rest))
            }
            None => Ok(PathBuf::from(text)),
        }
    }

    fn show(&self) -> String {
        self.display().to_string()
    }
}

impl Value for String {
    fn parse(text: &str, _: &Kind) -> Result<Self, String> {
        if text.trim().is_empty() { Err("must not be empty".to_owned()) } else { Ok(text.to_owned()) }
    }

    fn show(&self) -> String {
        self.clone()
    }
}
