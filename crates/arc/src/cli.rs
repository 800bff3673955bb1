//! The command line: what can be written, and which file does it.

mod bench;
mod chat;
mod eval;
mod flags;
mod generate;
mod inspect;
mod profile;
mod pull;
mod run;
mod serve;
mod settings;
mod shell;

use std::{io, path::PathBuf, process::ExitCode};

use anyhow::Result;
use arc::{
    config::{Config, LogFormat, Resolved, layers::Inputs},
    open::Described,
};
use clap::{Parser, Subcommand};

use settings::{AllFlags, EngineFlags, GlobalFlags, ServerFlags};

/// Exit code of an answer that was interrupted: 128 + SIGINT, as shells count.
const INTERRUPTED: u8 = 130;

/// Runs language models on this machine.
#[derive(Debug, Parser)]
#[command(name = "arc", version, arg_required_else_help = true, disable_help_subcommand = true, max_term_width = 120)]
#[command(after_help = "MODEL is a name (arc pull lists them) or the path of a model file.\n\
    Every setting may also stand in the configuration file or as ARC_<NAME>; arc flags lists them all.")]
struct Cli {
    /// Configuration file [default: ~/.config/arc/config.toml, if it is there]
    #[arg(long, value_name = "FILE", global = true)]
    config: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Answer one prompt
    Run(run::Args),
    /// Hold a conversation
    Chat(chat::Args),
    /// Serve the OpenAI API over HTTP
    Serve(serve::Args),
    /// Measure prefill and decode speed
    Bench(bench::Args),
    /// Measure how well a model predicts a text, or write down its logits
    Eval(eval::Args),
    /// Show what is in a model file and what it would take to run it
    Inspect(inspect::Args),
    /// Count what a step cost, in a trace of Nsight Systems
    Profile(profile::Args),
    /// Bring a model into the cache, or list the models that have names
    Pull(pull::Args),
    /// List every setting: type, value, and where the value came from
    Flags {
        #[command(flatten)]
        flags: AllFlags,
    },
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page
    Man,
}

/// Parses, runs, and turns an error into one sentence and an exit code: 1, or 2 where clap refused the command line.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    match execute(cli) {
        Ok(code) => code,
        // The reader of our output has gone: nothing is wrong, and nobody to tell.
        Err(e) if is_broken_pipe(&e) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {}", sentence(&e));
            ExitCode::FAILURE
        }
    }
}

fn execute(cli: Cli) -> Result<ExitCode> {
    let resolve = |flags: Vec<(String, String)>| -> Result<Resolved> {
        let resolved = Resolved::new(&Inputs::from_process(cli.config.clone(), flags))?;
        start_log(&resolved);
        Ok(resolved)
    };
    match cli.command {
        Command::Run(args) => run::run(&args, &resolve(args.flags.given())?.config),
        Command::Chat(args) => chat::run(&args, &resolve(args.flags.given())?.config),
        Command::Serve(args) => serve::run(&args, &resolve(args.flags.given())?.config),
        Command::Bench(args) => bench::run(&args, &resolve(args.flags.given())?.config),
        Command::Eval(args) => eval::run(&args, &resolve(args.given())?.config),
        Command::Inspect(args) => inspect::run(&args, &resolve(args.flags.given())?.config),
        Command::Profile(args) => profile::run(&args),
        Command::Pull(args) => pull::run(&args, &resolve(args.flags.given())?.config),
        Command::Flags { flags } => flags::run(&resolve(flags.given())?),
        Command::Completions { shell } => shell::completions(shell),
        Command::Man => shell::man(),
    }
}

/// The model of that name or path: pulled if it must be, its headers read and its arithmetic chosen, nothing loaded.
fn open_model(model: &str, config: &Config) -> Result<Described> {
    let path = arc::pull::resolve(model, &pull::options(config))?;
    let mut model = Described::read(&path)?;
    model.set_numerics(config.numerics)?;
    Ok(model)
}

fn start_log(resolved: &Resolved) {
    let level = match resolved.config.log {
        arc::config::LogLevel::Error => tracing::Level::ERROR,
        arc::config::LogLevel::Warn => tracing::Level::WARN,
        arc::config::LogLevel::Info => tracing::Level::INFO,
        arc::config::LogLevel::Debug => tracing::Level::DEBUG,
        arc::config::LogLevel::Trace => tracing::Level::TRACE,
    };
    let log = tracing_subscriber::fmt().with_max_level(level).with_writer(io::stderr);
    match resolved.config.log_format {
        LogFormat::Text => log.with_ansi(io::IsTerminal::is_terminal(&io::stderr())).init(),
        LogFormat::Json => log.json().init(),
    }
}

fn is_broken_pipe(e: &anyhow::Error) -> bool {
    e.chain().any(|c| c.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe))
}

/// The error and its causes as one line. Some errors say their cause themselves; then it is not said again.
fn sentence(e: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in e.chain().map(ToString::to_string).filter(|c| !c.is_empty()) {
        if !text.contains(&cause) {
            text = if text.is_empty() { cause } else { format!("{text}: {cause}") };
        }
    }
    one_line(&text)
}

/// Control characters from hostile files must not reach the terminal, and an error is one line.
fn one_line(text: &str) -> String {
    let clean: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(2000).collect();
    clean.split_whitespace().collect::<Vec<_>>().join(" ")
}
