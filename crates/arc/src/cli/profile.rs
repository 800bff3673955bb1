//! `arc profile`: what a step of a traced run cost, counted in an export of Nsight Systems.

mod nsys;

use std::{
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

use nsys::{Class, Query, Report, Tally};

/// Longest that reading may take.
const TIME: Duration = Duration::from_secs(120);
/// Lines of a part of the table that are printed.
const SHOWN: usize = 40;
/// Characters of a name that are printed.
const NAME_SHOWN: usize = 44;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
    nsys profile --trace=cuda --cuda-graph-trace=node --cuda-trace-all-apis=true -o run arc bench MODEL --device cuda\n\
    nsys export --type sqlite run.nsys-rep\n\
    arc profile --nsys-sqlite run.sqlite\n\n\
    Steps are counted in two ways: by what ends them on the device, and by the call that starts them. Where the two \
    differ, nothing is divided.\n\n\
    What counts lies between the end of the last step that --skip leaves out and the end of the last step; of calls, \
    between the calls that launched these two ends. All else is outside: load, warm-up, what came after.\n\n\
    With --cuda-graph-trace=graph, the kernels of graphs are not in the file and every graph is a step, so that a step of \
    two graphs, as grammars may need, is two; with node, the counts of such steps differ. Without \
    --cuda-trace-all-apis=true, nsys leaves out calls that it finds unimportant.")]
pub struct Args {
    /// SQLite export of Nsight Systems
    #[arg(long, value_name = "FILE")]
    nsys_sqlite: PathBuf,
    /// Kernel that ends a step [default: step_commit, or any graph where graphs were traced whole]
    #[arg(long, value_name = "NAME")]
    step_kernel: Option<String>,
    /// Call that starts a step
    #[arg(long, value_name = "NAME", default_value = "cuGraphLaunch")]
    step_call: String,
    /// Steps in front that do not count, such as those of a warm-up; counting begins where the last of them ends
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    skip: u32,
    /// Steps that count [default: all that follow]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    steps: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let query = Query {
        step_kernel: args.step_kernel.as_deref(),
        step_call: &args.step_call,
        skip: args.skip as usize,
        steps: args.steps.map(|n| n as usize),
        time: TIME,
    };
    let report = nsys::read(&args.nsys_sqlite, &query).with_context(|| args.nsys_sqlite.display().to_string())?;
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{:#}", report.json(args))?;
    } else {
        report.text(args, &mut out)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What a kind of call is called: in JSON, and in the table.
fn class_names(class: Class) -> (&'static str, &'static str) {
    match class {
        Class::Launch => ("launches", "kernel launches"),
        Class::GraphLaunch => ("graph_launches", "graph launches"),
        Class::Wait => ("waits", "waits"),
        Class::BlockingCopy => ("blocking_copies", "copies that are not Async"),
        Class::Alloc => ("allocs", "allocations"),
        Class::Free => ("frees", "frees"),
    }
}

/// `CUpti_ActivityMemcpyKind`, of which an export has three more.
fn direction(kind: i64) -> String {
    let name = match kind {
        1 => "host to device",
        2 => "device to host",
        8 => "device to device",
        9 => "host to host",
        10 => "peer to peer",
        11 => "unified, host to device",
        12 => "unified, device to host",
        13 => "unified, device to device",
        _ => return format!("kind {kind}"),
    };
    name.to_owned()
}

impl Report {
    fn per_step(&self, n: u64) -> f64 {
        n as f64 / self.steps as f64
    }

    fn us_per_step(&self, ns: u64) -> f64 {
        self.per_step(ns) / 1e3
    }

    /// A tally, behind what tells it from others.
    fn line(&self, key: Value, tally: &Tally) -> Value {
        let Value::Object(mut line) = key else { unreachable!("keys are objects") };
        line.insert("count".to_owned(), json!(tally.counted));
        line.insert("per_step".to_owned(), json!(self.per_step(tally.counted)));
        line.insert("outside".to_owned(), json!(tally.outside));
        line.insert("us_per_step".to_owned(), json!(self.us_per_step(tally.ns)));
        Value::Object(line)
    }

    fn json(&self, args: &Args) -> Value {
        let call = |(class, tally): (&Class, _)| (class_names(*class).0.to_owned(), self.line(json!({}), tally));
        let copy = |(&(kind, bytes), tally): (&(i64, u64), _)| {
            self.line(json!({"direction": direction(kind), "bytes": bytes}), tally)
        };
        let anchor =
            |what: &str, tally: &Tally| json!({"what": what, "count": tally.counted, "in_file": tally.in_file()});
        json!({
            "file": args.nsys_sqlite.display().to_string(),
            "steps": self.steps,
            "skipped": args.skip,
            "step_us": self.us_per_step(self.ns),
            "anchors": {
                "device": anchor(&self.device.0, &self.device.1),
                "host": anchor(&args.step_call, &self.host),
            },
            "calls": self.calls.iter().map(call).collect::<Map<_, _>>(),
            "copies": self.copies.iter().map(copy).collect::<Vec<_>>(),
            "memsets": self.memsets.iter().map(|(n, tally)| self.line(json!({"bytes": n}), tally)).collect::<Vec<_>>(),
            "graphs": self.graphs.as_ref().map(|tally| self.line(json!({}), tally)),
            "kernels": self.kernels.iter().map(|(n, tally)| self.line(json!({"name": n}), tally)).collect::<Vec<_>>(),
        })
    }

    fn text(&self, args: &Args, out: &mut impl Write) -> io::Result<()> {
        let (steps, us, skip) = (self.steps, self.us_per_step(self.ns), args.skip);
        let (device, ran, call, called) = (&self.device.0, self.device.1, &args.step_call, self.host);
        writeln!(out, "{}: {steps} steps of {us:.1} us, behind {skip} that do not count", args.nsys_sqlite.display())?;
        writeln!(
            out,
            "{} ran {} times ({} in the file), {} was called {} times ({} in the file)",
            device.escape_debug(),
            ran.counted,
            ran.in_file(),
            call.escape_debug(),
            called.counted,
            called.in_file()
        )?;
        let calls = self.calls.iter().map(|(class, tally)| (class_names(*class).1.to_owned(), tally));
        self.part("calls", calls, out)?;
        let copies = self.copies.iter().map(|((kind, n), tally)| (format!("{}, {n} B", direction(*kind)), tally));
        self.part("copies", copies, out)?;
        self.part("memsets", self.memsets.iter().map(|(n, tally)| (format!("{n} B"), tally)), out)?;
        let graphs = self.graphs.iter().map(|tally| ("whole: their kernels are not in the file".to_owned(), tally));
        self.part("graphs", graphs, out)?;
        let kernels = self
            .kernels
            .iter()
            .map(|(name, tally)| (name.chars().take(NAME_SHOWN).collect::<String>().escape_debug().to_string(), tally));
        self.part("kernels", kernels, out)
    }

    /// A part of the table, if there is something in it.
    fn part<'a>(
        &self,
        title: &str,
        lines: impl Iterator<Item = (String, &'a Tally)>,
        out: &mut impl Write,
    ) -> io::Result<()> {
        let mut lines = lines.peekable();
        if lines.peek().is_none() {
            return Ok(());
        }
        let head = ["count", "a step", "us a step", "outside"];
        writeln!(out, "\n{title:<46} {:>10} {:>10} {:>10} {:>10}", head[0], head[1], head[2], head[3])?;
        for (name, tally) in lines.by_ref().take(SHOWN) {
            let (counted, a_step, outside) = (tally.counted, self.per_step(tally.counted), tally.outside);
            let us = self.us_per_step(tally.ns);
            writeln!(out, "  {name:<44} {counted:>10} {a_step:>10.3} {us:>10.1} {outside:>10}")?;
        }
        let more = lines.count();
        if more > 0 {
            writeln!(out, "  and {more} more, which --json has")?;
        }
        Ok(())
    }
}
