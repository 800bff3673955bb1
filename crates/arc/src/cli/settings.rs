//! The settings of [`arc::config`] as flags: clap's arguments are made from the table, so that they cannot differ from it.

use arc::config::{Config, Kind, SETTINGS, Scope, Setting};
use clap::{Arg, ArgMatches, Command, builder::PossibleValuesParser};

/// Settings that were given as flags: name and text, checked when the layers are resolved.
type Given = Vec<(String, String)>;

fn args<'a>(scopes: &'a [Scope]) -> impl Iterator<Item = Arg> + 'a {
    let defaults = Config::default();
    SETTINGS.iter().filter(|s| scopes.contains(&s.scope)).map(move |s| {
        let help = match s.kind {
            // Completions and manual pages travel, so they name no folder of this machine; the text says where it is.
            Kind::Path => s.doc.trim().to_owned(),
            _ => {
                let default = defaults.show(s.name).expect("every listed setting can be shown");
                format!("{} [default: {default}]", s.doc.trim())
            }
        };
        let mut arg = Arg::new(s.name)
            .long(s.flag())
            .help(help)
            .value_name(value_name(s))
            .allow_hyphen_values(true)
            .help_heading(match s.scope {
                Scope::Global => "Settings",
                Scope::Engine => "Engine settings",
                Scope::Server => "Server settings",
            });
        if let Kind::Choice(words) = s.kind {
            arg = arg.value_parser(PossibleValuesParser::new(words));
        }
        arg
    })
}

fn value_name(s: &Setting) -> &'static str {
    match s.kind {
        Kind::Int(..) | Kind::AutoInt(..) | Kind::AutoOffInt(..) => "N",
        Kind::Choice(_) => "WORD",
        Kind::Address => "ADDRESS",
        Kind::Path => "PATH",
        Kind::Text => "TEXT",
    }
}

fn given(scopes: &[Scope], matches: &ArgMatches) -> Given {
    SETTINGS
        .iter()
        .filter(|s| scopes.contains(&s.scope))
        .filter_map(|s| Some((s.name.to_owned(), matches.get_one::<String>(s.name)?.clone())))
        .collect()
}

macro_rules! flag_set {
    ($(#[doc = $doc:literal] $name:ident = [$($scope:ident),+];)+) => {$(
        #[doc = $doc]
        #[derive(Debug, Clone, Default)]
        pub struct $name(Given);

        impl $name {
            const SCOPES: &[Scope] = &[$(Scope::$scope),+];

            /// What was given on the command line.
            pub fn given(&self) -> Vec<(String, String)> {
                self.0.clone()
            }
        }

        impl clap::Args for $name {
            fn augment_args(cmd: Command) -> Command {
                cmd.args(args(Self::SCOPES))
            }

            fn augment_args_for_update(cmd: Command) -> Command {
                Self::augment_args(cmd)
            }
        }

        impl clap::FromArgMatches for $name {
            fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
                Ok($name(given(Self::SCOPES, matches)))
            }

            fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
                self.0 = given(Self::SCOPES, matches);
                Ok(())
            }
        }
    )+};
}

flag_set! {
    /// For commands that run no model.
    GlobalFlags = [Global];
    /// For commands that run a model.
    EngineFlags = [Engine, Global];
    /// For the server.
    ServerFlags = [Server, Engine, Global];
    /// For every setting.
    AllFlags = [Global, Engine, Server];
}
