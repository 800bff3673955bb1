//! `arc inspect`: what is in a model file, before anything of it is loaded.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    process::ExitCode,
};

use anyhow::Result;
use arc::{
    config::{AutoOff, Config},
    open::{Described, OpenError},
};
use arc_device::{
    MemoryClass,
    step::{BLOCK_TOKENS, Limits},
    trace::listing,
};
use arc_engine::{
    load::{
        ModelFile,
        gguf::{Array, Value},
    },
    model::{
        ModelConfig, PLANNED_DRAFTS, Plan,
        deepseek_v4::{Report, V4Config},
    },
};

use super::{EngineFlags, open_model, serve};

/// Characters of a metadata value that are shown.
const VALUE_MAX: usize = 100;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name or path of the model
    model: String,
    /// Print the stages of a decode step
    #[arg(long)]
    step_trace: bool,
    #[command(flatten)]
    pub flags: EngineFlags,
}

pub fn run(args: &Args, config: &Config) -> Result<ExitCode> {
    let model = open_model(&args.model, config)?;
    let tokens = match model.tokenizer() {
        Err(OpenError::Random { .. }) => format!("{} tokens", model.config.shape().vocab),
        Ok(tokenizer) => format!("{} tokens", tokenizer.n_vocab()),
        // All else can be told; a tokenizer that is there but wrong is an error like any other.
        Err(OpenError::NoTokenizer { .. }) => {
            format!("{} tokens (but no tokenizer.json, so it cannot run)", model.config.shape().vocab)
        }
        Err(e) => return Err(e.into()),
    };
    // Before anything is printed: a model that cannot be loaded is an error, not a half page.
    let plan = model.plan(config, serve::SIZES)?;
    let mut out = io::stdout().lock();
    writeln!(out, "{}", model.path.display())?;
    writeln!(
        out,
        "{} ({}), {:.1} M parameters, {}, {tokens}, trained for a context of {}",
        model.title().escape_debug(),
        model.config.arch(),
        model.parameters() as f64 / 1e6,
        model.main_format(),
        model.config.context(),
    )?;
    metadata(&model, &mut out)?;
    tensors(&model, &mut out)?;
    if let ModelConfig::DeepseekV4(v4) = &model.config {
        v4_table(&Report::new(&model.file, v4), v4, &mut out)?;
        let drafts = match (model.to_load(config), config.show("speculate")) {
            (ModelConfig::DeepseekV4(v4), Some(speculate)) if v4.draft => format!("{speculate}, with the draft block"),
            _ if config.speculate == AutoOff::Off => "off".to_owned(),
            _ => "no draft block that can be used".to_owned(),
        };
        writeln!(out, "speculate: {drafts}")?;
    }
    memory(&plan, &model.limits(config, serve::SIZES)?, &mut out)?;
    if args.step_trace {
        writeln!(out, "\nstages of a decode step: bytes of weights, bytes of KV cache, shapes")?;
        for line in listing(&plan.decode_step).lines() {
            writeln!(out, "  {line}")?;
        }
        if !plan.speculating_step.is_empty() {
            writeln!(out, "\nstages of a step that checks {PLANNED_DRAFTS} drafts and makes {PLANNED_DRAFTS}")?;
            for line in listing(&plan.speculating_step).lines() {
                writeln!(out, "  {line}")?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What loading would allocate with these settings, as `arc serve` has them.
fn memory(plan: &Plan, limits: &Limits, out: &mut impl Write) -> io::Result<()> {
    writeln!(
        out,
        "\nmemory, for {} slots, a context of {}, {} tokens of KV cache, steps of {} rows",
        limits.slots,
        limits.context,
        limits.blocks * BLOCK_TOKENS,
        limits.rows
    )?;
    let width = plan.memory.lines().iter().map(|l| l.name.chars().count()).max().unwrap_or(0);
    for class in [MemoryClass::Weights, MemoryClass::State, MemoryClass::Workspace] {
        for line in plan.memory.lines().iter().filter(|l| l.class == class) {
            writeln!(out, "  {:<9}  {:<width$} {:>12}", class.name(), line.name, mib(line.bytes))?;
        }
    }
    writeln!(out, "  {:<9}  {:<width$} {:>12}", "total", "", mib(plan.memory.total_bytes()))
}

/// What DeepSeek-V4 has beside a decoder's few lines. MB: a million bytes.
fn v4_table(report: &Report, config: &V4Config, out: &mut impl Write) -> io::Result<()> {
    let mb = |bytes: u64| format!("{:.1} MB", bytes as f64 / 1e6);
    let billions = |n: u64| format!("{:.2} B", n as f64 / 1e9);
    writeln!(out, "\nnumerics: {}", config.numerics().name())?;
    write!(out, "trunk: {:.1} B parameters, {} tensors", report.parameters() as f64 / 1e9, report.tensors)?;
    match report.released_tensors.filter(|&released| released != report.tensors) {
        Some(released) => writeln!(out, ", {released} as released")?,
        None => writeln!(out)?,
    }
    writeln!(out, "  {:<22} {:>10} {:>12} {:>14}", "weights", "parameters", "bytes", "a token reads")?;
    for row in &report.classes {
        let (parameters, bytes, read) = (billions(row.parameters), mb(row.bytes), mb(row.read_bytes));
        writeln!(out, "  {:<22} {parameters:>10} {bytes:>12} {read:>14}", row.class.name())?;
    }
    let (parameters, bytes, read) = (billions(report.parameters()), mb(report.bytes()), mb(report.read_bytes()));
    writeln!(out, "  {:<22} {parameters:>10} {bytes:>12} {read:>14}", "total")?;
    writeln!(out, "  {:<22} {:>10} {:>12}", "draft block", "", mb(report.draft_bytes))?;
    let state = report.sequence;
    writeln!(
        out,
        "a sequence: {} of window rows, {} and {} of compressor rings (by 4, by 128), {} bytes of rows a token",
        mb(state.window as u64),
        mb(state.sparse_rings as u64),
        mb(state.heavy_rings as u64),
        report.kv_bytes_per_token
    )?;
    writeln!(out, "rope tables: {} bytes a position", report.rope_bytes_per_position)
}

fn metadata(model: &Described, out: &mut impl Write) -> io::Result<()> {
    let ModelFile::Gguf(file) = &*model.file else { return Ok(()) };
    writeln!(out, "\nmetadata")?;
    for (key, value) in file.metadata().iter() {
        writeln!(out, "  {} = {}", key.escape_debug(), shown(value))?;
    }
    Ok(())
}

fn shown(value: Value<'_>) -> String {
    match value {
        Value::Unsigned(x) => x.to_string(),
        Value::Signed(x) => x.to_string(),
        Value::F32(x) => x.to_string(),
        Value::F64(x) => x.to_string(),
        Value::Bool(x) => x.to_string(),
        Value::Str(text) => quoted(text),
        Value::Array(array) => array_shown(array),
    }
}

/// In quotes, with control characters escaped, cut where it is long.
fn quoted(text: &str) -> String {
    let cut: String = text.chars().take(VALUE_MAX).collect();
    let more = if cut.len() < text.len() { format!(" ... ({} bytes)", text.len()) } else { String::new() };
    format!("{cut:?}{more}")
}

fn array_shown(array: Array<'_>) -> String {
    let few: Vec<String> = array.iter().take(4).map(shown).collect();
    let more = if array.len() > few.len() { ", ..." } else { "" };
    format!("{} x {} [{}{more}]", array.len(), array.element().name(), few.join(", "))
}

/// One line for each kind of tensor: the same name but for the layer's number.
#[derive(Default)]
struct Class {
    count: usize,
    bytes: u64,
    shapes: BTreeMap<String, usize>,
    formats: BTreeMap<&'static str, usize>,
}

fn tensors(model: &Described, out: &mut impl Write) -> io::Result<()> {
    let mut classes = BTreeMap::<String, Class>::new();
    let contents = model.file.contents();
    for tensor in &contents {
        let parts = tensor.name.split('.').map(|p| if p.bytes().all(|b| b.is_ascii_digit()) { "*" } else { p });
        let class = classes.entry(parts.collect::<Vec<_>>().join(".").escape_debug().to_string()).or_default();
        class.count += 1;
        class.bytes += tensor.n_bytes;
        let dims: Vec<String> = tensor.shape.iter().map(usize::to_string).collect();
        *class.shapes.entry(dims.join(" x ")).or_default() += 1;
        *class.formats.entry(tensor.type_name).or_default() += 1;
    }
    let total: u64 = classes.values().map(|c| c.bytes).sum();
    let width = classes.keys().map(|k| k.chars().count()).max().unwrap_or(0);
    writeln!(out, "\ntensors: {}, {}", contents.len(), mib(total))?;
    for (name, class) in &classes {
        let list = |map: &BTreeMap<String, usize>| match map.len() {
            1 => map.keys().next().cloned().unwrap_or_default(),
            _ => map.iter().map(|(k, n)| format!("{n} of {k}")).collect::<Vec<_>>().join(", "),
        };
        let formats = class.formats.iter().map(|(k, n)| ((*k).to_owned(), *n)).collect();
        writeln!(
            out,
            "  {name:<width$} {:>4} {:>12}  {}  {}",
            class.count,
            mib(class.bytes),
            list(&formats),
            list(&class.shapes)
        )?;
    }
    Ok(())
}

fn mib(bytes: u64) -> String {
    format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20))
}
