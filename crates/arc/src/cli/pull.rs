//! `arc pull`.

use std::{
    io::{self, Write},
    process::ExitCode,
};

use anyhow::Result;
use arc::{
    config::Config,
    pull::{self, MODELS, PullOptions},
};

use super::GlobalFlags;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name of the model; without it, the names are listed
    model: Option<String>,
    #[command(flatten)]
    pub flags: GlobalFlags,
}

pub fn run(args: &Args, config: &Config) -> Result<ExitCode> {
    let options = options(config);
    let mut out = io::stdout().lock();
    let Some(name) = &args.model else {
        for entry in MODELS {
            let cached = options.cache_dir.join("models").join(entry.file).exists();
            let mib = entry.bytes as f64 / f64::from(1 << 20);
            writeln!(out, "{:<16} {mib:>7.1} MiB  {}", entry.name, if cached { "in the cache" } else { "" })?;
        }
        return Ok(ExitCode::SUCCESS);
    };
    let pulled = pull::pull(pull::entry(name)?, &options)?;
    writeln!(out, "{} ({})", pulled.path.display(), pulled.source)?;
    Ok(ExitCode::SUCCESS)
}

/// What the configuration says about pulls.
pub fn options(config: &Config) -> PullOptions {
    PullOptions { cache_dir: config.cache_dir.clone(), hub: config.hub.clone(), progress: config.progress.is_on() }
}
