//! Runs cases, one line each, and counts what failed.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

use arc_device::cpu::Cpu;
use arc_device::cuda::{Cuda, CudaOptions};
use arc_device::error::Result as DeviceResult;
use arc_device::step::{CtxClass, Limits, Part, Row, StepDelta, StepKey, row_flags};
use arc_device::{Alloc, Landing, ModelShape};

/// What a case found: a remark, or what was wrong.
pub type Verdict = Result<String, String>;

/// The cases, and what became of them.
pub struct Suite {
    ordinal: usize,
    /// What all cases' devices are beside: none is opened for each of them.
    open: Option<Cuda>,
    perf: bool,
    /// Cases are named and not run.
    list: bool,
    /// Cases that the filters let through, those to be measured too.
    found: Cell<usize>,
    /// How often a case runs.
    repeat: usize,
    filters: Vec<String>,
    skips: Vec<String>,
    passed: usize,
    failed: Vec<String>,
}

/// The same limits on both devices.
pub struct Pair {
    /// The replica.
    pub cpu: Cpu,
    /// What is tested.
    pub gpu: Cuda,
}

impl Suite {
    /// A suite of the cases whose names contain one of `filters`, or of all, but for those that contain one of `skips`.
    pub fn new(ordinal: usize, perf: bool, filters: Vec<String>, skips: Vec<String>) -> Suite {
        Suite {
            ordinal,
            open: None,
            perf,
            list: false,
            found: Cell::new(0),
            repeat: 1,
            filters,
            skips,
            passed: 0,
            failed: Vec::new(),
        }
    }

    /// The same, which only names its cases.
    pub fn list(self) -> Suite {
        Suite { list: true, ..self }
    }

    /// The same, which runs each case so often: what depends on who comes first may go well once.
    pub fn repeat(self, times: usize) -> Suite {
        Suite { repeat: times, ..self }
    }

    /// Opens the GPU and says which it is, or why it cannot.
    pub fn look(&mut self) -> Result<(), String> {
        let gpu = self.gpu(limits(1, 1)).map_err(|error| error.to_string())?;
        let (free, total) = gpu.device_memory();
        println!(
            "device {}: {}, driver {}.{}, {} multiprocessors, {:.1} of {:.1} GiB free",
            self.ordinal,
            gpu.name(),
            gpu.driver_version() / 1000,
            gpu.driver_version() % 1000 / 10,
            gpu.multiprocessors(),
            free as f64 / (1u64 << 30) as f64,
            total as f64 / (1u64 << 30) as f64,
        );
        self.open = Some(gpu);
        Ok(())
    }

    /// Which GPU.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// A GPU that runs eagerly.
    pub fn gpu(&self, limits: Limits) -> DeviceResult<Cuda> {
        match &self.open {
            Some(gpu) => Ok(gpu.beside(limits)),
            None => Cuda::new(CudaOptions { ordinal: self.ordinal, capture: false, ..CudaOptions::default() }, limits),
        }
    }

    /// Both devices. Panics, which fails the case, where the GPU cannot be opened.
    pub fn pair(&self, limits: Limits) -> Pair {
        Pair { cpu: Cpu::new(4, limits), gpu: self.gpu(limits).expect("`look` opened it before") }
    }

    fn wanted(&self, name: &str) -> bool {
        let found = |texts: &[String]| texts.iter().any(|text| name.contains(&**text));
        let wanted = (self.filters.is_empty() || found(&self.filters)) && !found(&self.skips);
        self.found.set(self.found.get() + usize::from(wanted));
        wanted
    }

    /// Runs a case; a panic fails it. Skipped where figures are wanted.
    pub fn case(&mut self, name: &str, run: impl Fn(&Suite) -> Verdict) {
        if self.wanted(name) && !self.perf {
            self.run(name, run);
        }
    }

    /// Measures, where figures are wanted.
    pub fn measure(&mut self, name: &str, run: impl Fn(&Suite) -> Verdict) {
        if self.wanted(name) && self.perf {
            self.run(name, run);
        }
    }

    /// A deliberately wrong variant: the case passes where `run` finds it wrong.
    pub fn mutant(&mut self, name: &str, run: impl Fn(&Suite) -> Verdict) {
        self.case(&format!("{name} (mutant)"), |suite| match run(suite) {
            Ok(_) => Err("the mutant was not noticed".to_owned()),
            Err(why) => Ok(format!("caught: {why}")),
        });
    }

    fn run(&mut self, name: &str, run: impl Fn(&Suite) -> Verdict) {
        if self.list {
            println!("{name}");
            return;
        }
        let started = Instant::now();
        let once = || {
            catch_unwind(AssertUnwindSafe(|| run(self))).unwrap_or_else(|panic| {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&s| s.to_owned()));
                Err(text.unwrap_or("panicked".to_owned()))
            })
        };
        let mut verdict = once();
        let mut wrong = usize::from(verdict.is_err());
        for _ in 1..self.repeat {
            let again = once();
            wrong += usize::from(again.is_err());
            verdict = verdict.and(again);
        }
        if self.repeat > 1 {
            verdict = verdict.map_err(|why| format!("{wrong} times of {}: {why}", self.repeat));
        }
        let ms = started.elapsed().as_millis();
        match verdict {
            Ok(remark) => {
                self.passed += 1;
                println!("ok    {name}  {remark}  [{ms} ms]");
            }
            Err(why) => {
                println!("FAIL  {name}  {why}  [{ms} ms]");
                self.failed.push(name.to_owned());
            }
        }
    }

    /// The summary. That no case was asked for is not that all passed.
    pub fn finish(self) -> ExitCode {
        if self.found.get() == 0 {
            eprintln!("no case has {:?} in its name (--list names all)", self.filters);
            return ExitCode::from(2);
        }
        if self.list {
            return ExitCode::SUCCESS;
        }
        println!("{} passed, {} failed {:?}", self.passed, self.failed.len(), self.failed);
        ExitCode::from(u8::from(!self.failed.is_empty()))
    }
}

/// Limits for stages at up to `rows` rows, each of its own slot or all of one, and contexts of up to `context` tokens.
pub fn limits(rows: usize, context: usize) -> Limits {
    let per_slot = Limits::blocks_for(context.max(32));
    Limits { slots: rows.min(256), rows, heads: rows.min(256), context, blocks: per_slot * rows.min(256), ring: 16 }
}

/// A model's shape for devices that run single stages.
pub fn shape(vocab: usize, hidden: usize) -> ModelShape {
    ModelShape { vocab, hidden, post_norms: true, gathered: 0 }
}

/// The key of a step that only runs stages: nothing is drawn or committed.
pub fn stage_key(rows: usize) -> StepKey {
    StepKey::new(rows as u32, 256, CtxClass::Long, Part::Forward)
}

/// A decoding row of `slot`.
pub fn decode_row(slot: usize, token: u32) -> Row {
    Row { slot: slot as u16, flags: row_flags::HEAD | row_flags::SAMPLE, offset: 0, token, target: 0 }
}

impl Pair {
    /// Sizes both devices for the model.
    pub fn finish(&mut self, shape: &ModelShape) {
        self.cpu.finish(shape).expect("the CPU has room");
        self.gpu.finish(shape).expect("the GPU has room");
    }

    /// Stages a change on both devices.
    pub fn stage(&mut self, delta: &StepDelta) {
        self.cpu.stage(delta).expect("the CPU takes changes");
        self.gpu.stage(delta).expect("the GPU takes changes");
    }
}
