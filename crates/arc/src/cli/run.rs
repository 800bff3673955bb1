//! `arc run`: one prompt, one answer.

use std::{
    fs::File,
    io::{self, IsTerminal, Read, Write},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Context, Result, bail};
use arc::{
    config::Config,
    model_text::{ChatMessage, Role},
    open::{self, Sizes},
};
use serde_json::json;

use super::{
    EngineFlags,
    generate::{self, SamplingArgs},
    open_model,
};

/// Largest prompt that is read from a file or from standard input: far more than any context holds.
const PROMPT_MAX: u64 = 16 << 20;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name or path of the model
    model: String,
    /// What to answer; without it, and without --file, standard input is read
    #[arg(conflicts_with = "file")]
    prompt: Option<String>,
    /// Read the prompt from a file; - is standard input
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Instructions that stand before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Continue the text as it stands, without a chat template
    #[arg(long)]
    raw: bool,
    /// Print one JSON object instead of the text
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    pub flags: EngineFlags,
}

pub fn run(args: &Args, config: &Config) -> Result<ExitCode> {
    args.sampling.check()?;
    let prompt = prompt(args)?;
    let model = open_model(&args.model, config)?;
    let running = open::start(&model, config, Sizes::slots(1))?;
    let ids = if args.raw {
        running.text.encode_prompt(&prompt)?
    } else {
        let system = args.system.iter().map(|text| ChatMessage::new(Role::System, text.as_str()));
        let messages: Vec<ChatMessage> = system.chain([ChatMessage::new(Role::User, prompt)]).collect();
        if !running.text.has_template() {
            bail!("{} has no chat template that works: use --raw to continue plain text", args.model);
        }
        running.text.encode_chat(&messages, None)?
    };
    let request = args.sampling.request(&running.text, ids);
    let seed = request.sampling.seed;
    generate::catch_interrupts()?;
    let mut out = io::stdout().lock();
    let json = args.json;
    let outcome = generate::answer(&running.engine, &running.text, request, args.sampling.stops(), |piece| {
        if json {
            return Ok(());
        }
        out.write_all(piece.as_bytes())?;
        out.flush()
    })?;
    if json {
        let f = &outcome.finished;
        let body = json!({
            "model": args.model,
            "text": outcome.text,
            "finish_reason": outcome.reason,
            "seed": seed,
            "prompt_tokens": f.prompt_tokens,
            "cached_tokens": f.cached_tokens,
            "output_tokens": outcome.n_tokens,
            "queue_ms": f.queue_us as f64 / 1e3,
            "prefill_ms": f.prefill_us as f64 / 1e3,
            "decode_ms": f.decode_us as f64 / 1e3,
            "prefill_tokens_per_s": outcome.prefill_rate(),
            "decode_tokens_per_s": outcome.decode_rate(),
        });
        writeln!(out, "{body}")?;
    } else {
        writeln!(out)?;
        eprintln!("{}", outcome.summary(seed));
    }
    Ok(if outcome.reason == "interrupted" { ExitCode::from(super::INTERRUPTED) } else { ExitCode::SUCCESS })
}

fn prompt(args: &Args) -> Result<String> {
    let (name, bytes) = match (&args.prompt, &args.file) {
        (Some(text), _) => return Ok(text.clone()),
        (None, Some(path)) if path.as_os_str() != "-" => {
            let name = path.display().to_string();
            let file = File::open(path).with_context(|| format!("cannot open {name}"))?;
            (name.clone(), read_bounded(file, &name)?)
        }
        (None, file) => {
            if file.is_none() && io::stdin().is_terminal() {
                bail!("no prompt: give one as an argument, with --file, or on standard input");
            }
            ("standard input".to_owned(), read_bounded(io::stdin().lock(), "standard input")?)
        }
    };
    let text = String::from_utf8(bytes).map_err(|e| {
        anyhow::anyhow!("{name} is not valid UTF-8: byte {} is the first wrong one", e.utf8_error().valid_up_to())
    })?;
    let text = without_last_newline(&text).to_owned();
    if text.is_empty() {
        bail!("{name} is empty");
    }
    Ok(text)
}

/// Editors and echo end a text with a line break that nobody means.
pub fn without_last_newline(text: &str) -> &str {
    text.strip_suffix('\n').map_or(text, |text| text.strip_suffix('\r').unwrap_or(text))
}

/// All of `source`, unless it is larger than any prompt. Errors name it.
pub fn read_bounded(source: impl Read, name: &str) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(PROMPT_MAX + 1).read_to_end(&mut bytes).with_context(|| format!("cannot read {name}"))?;
    if bytes.len() as u64 > PROMPT_MAX {
        bail!("{name} is larger than {PROMPT_MAX} bytes");
    }
    Ok(bytes)
}
