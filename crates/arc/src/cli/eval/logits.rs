//! `arc eval logits`: the logits of every token of a prompt, as a file.

use std::{
    fs::{File, Permissions},
    io::{BufWriter, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result, anyhow, bail};
use arc::{
    config::Config,
    open::{self, Sizes},
};
use arc_engine::logits::prompt_logits;
use serde_json::json;

use crate::cli::{EngineFlags, open_model, run::read_bounded};

/// Rows of a step where nobody asks for a number.
const CHUNK: u32 = 128;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name or path of the model
    model: String,
    /// Token ids: whole numbers between white space or commas, or a JSON array
    #[arg(long, value_name = "FILE")]
    ids: PathBuf,
    /// Rows of a step [default: 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    chunk: Option<u32>,
    /// Safetensors file to write, with one tensor: logits [tokens, vocab] f32
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    pub flags: EngineFlags,
}

pub fn run(args: &Args, config: &Config) -> Result<ExitCode> {
    let ids = read_ids(&args.ids)?;
    let model = open_model(&args.model, config)?;
    let vocab = model.config.shape().vocab;
    if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
        bail!("{} has the token {id}, but the vocabulary ends at {}", args.ids.display(), vocab - 1);
    }
    let sizes = Sizes { slots: 1, heads: Some(args.chunk.unwrap_or(CHUNK)), random_rows: false };
    let limits = model.limits(config, sizes)?;
    if ids.len() > limits.context {
        bail!("{} has {} tokens, the context is {}: set --context", args.ids.display(), ids.len(), limits.context);
    }
    let most = limits.rows.min(limits.heads);
    let chunk = args.chunk.map_or(most.min(CHUNK as usize), |n| n as usize);
    if chunk > most {
        bail!("--chunk is {chunk}, but a step has at most {most} rows: set --max-rows and --heads");
    }
    let mut runner = open::load(&model, config, &limits)?;
    // Beside the file, so that it appears whole or not at all.
    let folder = args.out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let written = || format!("cannot write {}", args.out.display());
    // With the mode that a file made here would have.
    let file = tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder)
        .map_err(|error| std::io::Error::from(error.kind()))
        .with_context(written)?;
    let mut out = BufWriter::new(file);
    out.write_all(&header(ids.len(), vocab)).with_context(written)?;
    let mut result = Ok(());
    prompt_logits(&mut *runner, &limits, &ids, chunk, &mut |row| {
        if result.is_ok() {
            result = row.iter().try_for_each(|logit| out.write_all(&logit.to_le_bytes()));
        }
    })?;
    result.with_context(written)?;
    out.into_inner().map_err(|e| e.into_error()).with_context(written)?.persist(&args.out).with_context(written)?;
    Ok(ExitCode::SUCCESS)
}

/// The start of a safetensors file with the one tensor: length, JSON, spaces up to a multiple of 8.
fn header(tokens: usize, vocab: usize) -> Vec<u8> {
    let end = 4 * tokens as u64 * vocab as u64;
    let mut text = json!({"logits": {"dtype": "F32", "shape": [tokens, vocab], "data_offsets": [0, end]}}).to_string();
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text.bytes());
    header
}

fn read_ids(path: &Path) -> Result<Vec<u32>> {
    let name = path.display().to_string();
    let bytes = read_bounded(File::open(path).with_context(|| format!("cannot open {name}"))?, &name)?;
    let text = String::from_utf8(bytes).map_err(|_| anyhow!("{name} is not text"))?;
    let text = text.trim();
    let list = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let words = list.split(|c: char| c.is_whitespace() || c == ',').filter(|word| !word.is_empty());
    let ids = words
        .map(|word| word.parse().map_err(|_| anyhow!("{name} has {word:?} where a token id must be")))
        .collect::<Result<Vec<u32>>>()?;
    if ids.is_empty() {
        bail!("{name} has no token ids");
    }
    Ok(ids)
}
