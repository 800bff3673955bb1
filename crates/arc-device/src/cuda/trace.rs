//! Where a step's time goes: every kernel leaves the time at which it may begin (`trace_begin` of pdl.cuh), which is when
//! the one before it has ended. So the differences are what each kernel adds to the step, overlap and gaps included, and
//! their sum is the step. A kernel that takes what the one before sends waits for its end when it ends itself: what it does by
//! then is counted to that one.
//!
//! Kernels that have `Marks` leave times inside their blocks too.
//!
//! For builds with `ARC_CUDA_TRACE` set: others have kernels without a word of this. At run time it names a file, where the
//! table is written when the device closes.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use super::CudaBuf;
use super::driver::{Driver, Grid};
use super::images::Kernel;
use crate::error::Result;
use crate::step::StepKey;

/// Times that there is room for: later kernels are not noted.
const MOST: usize = 1 << 21;
/// Blocks that there is room for: the last ones are kept.
const MOST_BLOCKS: usize = 1 << 20;
/// Replays of a key that are left out: memory is touched for the first time.
const WARM: usize = 2;

/// One launch of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Launched {
    pub kernel: Kernel,
    pub grid: Grid,
    /// Weights that it reads, as its stage counted them.
    pub weight_bytes: u64,
}

/// What ran, in order.
enum Ran {
    Launch,
    Graph(StepKey),
}

/// The notes of one device.
pub(super) struct Trace {
    to: PathBuf,
    /// A count, room, and times.
    at: CudaBuf<u8>,
    /// A count, room, and eight words a block: `Marks` of pdl.cuh.
    marks: CudaBuf<u8>,
    ran: Vec<Ran>,
    n_ran: usize,
    /// Launches since the recording began; `None` outside of one.
    recording: Option<Vec<Launched>>,
    graphs: BTreeMap<String, (StepKey, Vec<Launched>)>,
    weight_bytes: u64,
}

impl Trace {
    /// Begins to take times. `at`: zeroed memory of [`Trace::BYTES`].
    pub fn new(to: PathBuf, driver: &Driver, at: CudaBuf<u8>, marks: CudaBuf<u8>) -> Result<Trace> {
        let room = [0u32, MOST_BLOCKS as u32];
        driver.copy_in(marks.ptr(), room.as_ptr().cast(), size_of_val(&room), "trace")?;
        driver.set_global(c"arc_marks", marks.ptr())?;
        let head = [0u32, MOST as u32];
        driver.copy_in(at.ptr(), head.as_ptr().cast(), size_of_val(&head), "trace")?;
        if driver.set_global(c"arc_trace", at.ptr())? == 0 {
            tracing::warn!("kernels leave no times in this build: it has to be made with ARC_CUDA_TRACE set");
        }
        let (ran, graphs) = (Vec::new(), BTreeMap::new());
        Ok(Trace { to, at, marks, ran, n_ran: 0, recording: None, graphs, weight_bytes: 0 })
    }

    /// Bytes of device memory that it takes.
    pub const BYTES: usize = 8 * (MOST + 1);
    /// Bytes of device memory that the blocks' times take.
    pub const MARK_BYTES: usize = 64 * (MOST_BLOCKS + 1);

    /// A kernel was launched or recorded. `weight_bytes`: of all launches so far.
    pub fn launch(&mut self, kernel: Kernel, grid: Grid, weight_bytes: u64) {
        let launched = Launched { kernel, grid, weight_bytes: weight_bytes.saturating_sub(self.weight_bytes) };
        self.weight_bytes = weight_bytes;
        match &mut self.recording {
            Some(graph) => graph.push(launched),
            None => self.note(Ran::Launch, 1),
        }
    }

    /// What follows is recorded, not run.
    pub fn begin_record(&mut self) {
        self.recording = Some(Vec::new());
    }

    /// The recording is over.
    pub fn end_record(&mut self, key: StepKey) {
        let launches = self.recording.take().unwrap_or_default();
        self.graphs.insert(key.to_string(), (key, launches));
    }

    /// A recorded step runs.
    pub fn replay(&mut self, key: StepKey, weight_bytes: u64) {
        self.weight_bytes = weight_bytes;
        let n = self.graphs.get(&key.to_string()).map_or(0, |(_, launches)| launches.len());
        self.note(Ran::Graph(key), n);
    }

    fn note(&mut self, ran: Ran, n: usize) {
        if self.n_ran + n < MOST {
            self.ran.push(ran);
            self.n_ran += n;
        }
    }

    /// Writes the table.
    pub fn write(self, driver: &Driver) -> Result<()> {
        let mut times = vec![0u64; self.n_ran + 1];
        driver.synchronize("trace")?;
        driver.copy_out(times.as_mut_ptr().cast(), self.at.ptr(), 8 * times.len(), "trace")?;
        driver.synchronize("trace")?;
        let mut marks = vec![0u64; Self::MARK_BYTES / 8];
        driver.copy_out(marks.as_mut_ptr().cast(), self.marks.ptr(), Self::MARK_BYTES, "trace")?;
        driver.synchronize("trace")?;
        // Another device on this driver leaves nothing here.
        driver.set_global(c"arc_trace", 0)?;
        driver.set_global(c"arc_marks", 0)?;
        let noted = times[0] as u32 as usize;
        let mut text = String::new();
        if noted != self.n_ran {
            let _ = writeln!(text, "{} kernels ran, {noted} left a time: the table is not to be trusted", self.n_ran);
        }
        let times = &times[1..];
        let mut at = 0;
        // Sums and replays by key.
        let mut sums: BTreeMap<String, (usize, Vec<u64>)> = BTreeMap::new();
        for ran in &self.ran {
            let Ran::Graph(key) = ran else {
                at += 1;
                continue;
            };
            let name = key.to_string();
            let n = self.graphs.get(&name).map_or(0, |(_, launches)| launches.len());
            let (replays, sum) = sums.entry(name).or_insert_with(|| (0, vec![0; n]));
            *replays += 1;
            if *replays > WARM && at + n < times.len() {
                for (sum, pair) in sum.iter_mut().zip(times[at..=at + n].windows(2)) {
                    *sum += pair[1].saturating_sub(pair[0]);
                }
            }
            at += n;
        }
        for (name, (replays, sum)) in sums {
            // The last replay has no kernel behind it that says when it ended.
            let n = replays.saturating_sub(WARM + 1).max(1);
            if replays > WARM + 1 {
                table(&mut text, &name, n, &self.graphs[&name].1, &sum);
            }
        }
        marks_table(&mut text, &marks[8..]);
        if let Err(why) = std::fs::write(&self.to, text) {
            tracing::warn!(file = %self.to.display(), %why, "the trace was not written");
        }
        Ok(())
    }
}

/// Kernels of one step, the most costly first; launches of one kernel, grid and bytes together.
fn table(text: &mut String, name: &str, replays: usize, launches: &[Launched], sums: &[u64]) {
    let mut kinds: Vec<(Launched, usize, u64)> = Vec::new();
    for (launched, sum) in launches.iter().zip(sums) {
        match kinds.iter_mut().find(|(kind, ..)| kind == launched) {
            Some((_, n, total)) => (*n, *total) = (*n + 1, *total + sum),
            None => kinds.push((*launched, 1, *sum)),
        }
    }
    let us = |sum: u64| sum as f64 / 1e3 / replays as f64;
    let total = us(sums.iter().sum());
    let _ = writeln!(text, "{name}: {} launches, {total:.1} us, mean of {replays} replays", launches.len());
    let _ = writeln!(text, "{:>5} {:>8} {:>9} {:>5} {:>6}  kernel", "n", "us each", "us", "%", "GB/s");
    kinds.sort_by_key(|&(_, _, total)| std::cmp::Reverse(total));
    for (kind, n, sum) in kinds {
        let (all, each) = (us(sum), us(sum) / n as f64);
        let rate = kind.weight_bytes as f64 / each.max(1e-3) / 1e3;
        let [x, y, _] = kind.grid.blocks;
        let name = kind.kernel.name();
        let share = 100.0 * all / total;
        let _ = writeln!(
            text,
            "{n:>5} {each:>8.2} {all:>9.1} {share:>5.1} {rate:>6.0}  {name} {x}x{y}x{}",
            kind.grid.threads
        );
    }
    let _ = writeln!(text);
}

/// Kernels that leave marks: `MarkKind` of pdl.cuh.
const KINDS: [&str; 12] = [
    "product over few rows",
    "two products",
    "experts' units",
    "one row's experts",
    "experts' sums",
    "site",
    "router",
    "choice",
    "attention",
    "rows",
    "index",
    "layers",
];
/// Words of a block's record: whose it is, then a time a mark.
const RECORD: usize = 8;
/// Blocks of one launch pass their wait within so many nanoseconds.
const APART: u64 = 2500;

/// Times inside blocks, by kernel and what tells its launches apart (`Marks` of pdl.cuh): of every mark the median and the last of a
/// launch's blocks, in us since the first of them passed its wait (mark 2); of both the median over launches.
fn marks_table(text: &mut String, records: &[u64]) {
    let mut kinds: BTreeMap<u64, Vec<&[u64]>> = BTreeMap::new();
    for record in records.chunks_exact(RECORD).filter(|record| record[2] >= record[1] && record[1] != 0) {
        kinds.entry(record[0] >> 48).or_default().push(record);
    }
    let median = |values: &mut Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    };
    for (tag, mut blocks) in kinds {
        let name = KINDS.get((tag >> 12) as usize).copied().unwrap_or("unknown");
        blocks.sort_by_key(|record| record[2]);
        let launches: Vec<&[&[u64]]> = blocks.chunk_by(|a, b| b[2] - a[2] < APART).collect();
        let _ = write!(text, "{name} ({}): {} blocks of {} launches;", tag & 0xfff, blocks.len(), launches.len());
        for mark in 1..RECORD {
            let (mut middle, mut last) = (Vec::new(), Vec::new());
            for launch in &launches {
                let since = |record: &&[u64]| (record[mark] as f64 - launch[0][2] as f64) / 1e3;
                let mut times: Vec<f64> = launch.iter().filter(|record| record[mark] >= record[1]).map(since).collect();
                middle.extend(median(&mut times));
                last.extend(times.last());
            }
            if let Some((middle, last)) = median(&mut middle).zip(median(&mut last)) {
                let _ = write!(text, " {mark}: {middle:.2}/{last:.2}");
            }
        }
        let _ = writeln!(text);
    }
}

#[cfg(test)]
mod tests {
    use super::{Grid, Kernel, Launched, marks_table, table};

    #[test]
    fn marks_are_counted_from_the_first_wait_of_a_launch() {
        let block = |at: u64| [0x9003 << 48, at, at + 1000, at + 3000, 0, 0, 0, 0];
        let records = [block(50_000), block(50_400), block(10_000), [0; 8], block(50_900)].concat();
        let mut text = String::new();
        marks_table(&mut text, &records);
        assert_eq!(text, "rows (3): 4 blocks of 2 launches; 1: -0.60/-0.10 2: 0.40/0.90 3: 2.40/2.90\n");
    }

    #[test]
    fn launches_of_a_kind_are_one_line() {
        let launched =
            |blocks, weight_bytes| Launched { kernel: Kernel(0), grid: Grid::new(blocks, 256), weight_bytes };
        let launches = [launched(8, 3000), launched(1, 0), launched(8, 3000)];
        let mut text = String::new();
        // Nanoseconds of two replays.
        table(&mut text, "rows=1", 2, &launches, &[2000, 1000, 6000]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("rows=1: 3 launches, 4.5 us, mean of 2 replays"), "{text}");
        assert!(lines[2].contains("2.00") && lines[2].contains("4.0") && lines[2].ends_with("8x1x256"), "{text}");
        assert!(lines[3].ends_with("1x1x256") && lines.len() == 5, "{text}");
    }
}
