//! Counts what steps cost in an SQLite export of Nsight Systems.
//!
//! Tables and columns are those of NVIDIA's "SQLite Schema Reference". A table is there only where something of its kind was
//! recorded. Rows are read one by one: what is kept is a sum for each name and size, and where steps end.
//!
//! The file may be anybody's. It is opened immutable and read-only; its views, virtual tables and computed columns are not
//! looked at, and memory, time and the number of names are bounded.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Error, Result, anyhow, bail};
use rusqlite::{Connection, ErrorCode, OpenFlags, Row, config::DbConfig, limits::Limit};

/// Different names, or sizes, that are told apart.
const MOST_NAMES: usize = 1 << 14;
/// Characters of a kernel's name that are kept.
const NAME_MAX: usize = 200;
/// Steps that a file may have.
const MOST_STEPS: usize = 1 << 20;
/// Bytes of a row.
const ROW_BYTES: i32 = 1 << 20;
/// Bytes that SQLite may take.
const HEAP_BYTES: i64 = 32 << 20;
/// Ends an Arc step.
const STEP_KERNEL: &str = "step_commit";
/// How a file is made that has everything.
const RECORD: &str = "nsys profile --trace=cuda --cuda-graph-trace=node --cuda-trace-all-apis=true";

/// A table of events with a start and an end.
struct Events {
    table: &'static str,
    /// Process (or thread) of the event: the process is what is left of 24 bits.
    process: &'static str,
    /// What is read beside these.
    columns: &'static [&'static str],
    order: &'static str,
}

const fn on_device(table: &'static str, columns: &'static [&'static str]) -> Events {
    Events { table, process: "globalPid", columns, order: "" }
}

const KERNELS: Events = on_device("CUPTI_ACTIVITY_KIND_KERNEL", &["correlationId", "shortName"]);
const GRAPHS: Events = on_device("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", &["correlationId"]);
const COPIES: Events = on_device("CUPTI_ACTIVITY_KIND_MEMCPY", &["bytes", "copyKind"]);
const MEMSETS: Events = on_device("CUPTI_ACTIVITY_KIND_MEMSET", &["bytes"]);
/// Calls of driver and runtime. One that calls another shares its correlation id: the outer one comes first.
const CALLS: Events = Events {
    table: "CUPTI_ACTIVITY_KIND_RUNTIME",
    process: "globalTid",
    columns: &["correlationId", "nameId"],
    order: " ORDER BY correlationId, start",
};

/// What is asked.
pub struct Query<'a> {
    /// Kernel that ends a step; `None`: executions of graphs that were traced whole, where there are any, or Arc's.
    pub step_kernel: Option<&'a str>,
    /// Call that starts a step, without a version.
    pub step_call: &'a str,
    /// Steps in front that do not count, at least one: counting begins where the last of them ends.
    pub skip: usize,
    /// Steps that count; `None`: all that follow.
    pub steps: Option<usize>,
    /// Longest that reading may take.
    pub time: Duration,
}

/// How often, and how long all that counted took.
#[derive(Debug, Default, Clone, Copy)]
pub struct Tally {
    pub counted: u64,
    pub outside: u64,
    pub ns: u64,
}

impl Tally {
    fn add(&mut self, counts: bool, event: Event) -> Result<()> {
        if counts {
            let ns = event.end.abs_diff(event.start);
            self.ns = self.ns.checked_add(ns).context("times add up to more than a number can hold")?;
            self.counted += 1;
        } else {
            self.outside += 1;
        }
        Ok(())
    }

    /// How often in the whole file.
    pub fn in_file(&self) -> u64 {
        self.counted + self.outside
    }
}

/// Kinds of calls that a step should not need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    Launch,
    GraphLaunch,
    Wait,
    BlockingCopy,
    Alloc,
    Free,
}

impl Class {
    pub const ALL: [Class; 6] =
        [Class::Launch, Class::GraphLaunch, Class::Wait, Class::BlockingCopy, Class::Alloc, Class::Free];

    /// Of a call without its version.
    fn of(call: &str) -> Option<Class> {
        let name = call.strip_prefix("cuda").or_else(|| call.strip_prefix("cu"))?;
        let begins = |fronts: &[&str]| fronts.iter().any(|front| name.starts_with(front));
        match name {
            "GraphLaunch" => Some(Class::GraphLaunch),
            "LaunchHostFunc" => None,
            _ if begins(&["Launch"]) => Some(Class::Launch),
            _ if name.ends_with("Synchronize") => Some(Class::Wait),
            _ if begins(&["Memcpy"]) && !name.contains("Async") => Some(Class::BlockingCopy),
            _ if begins(&["MemAlloc", "MemHostAlloc", "MemCreate", "ArrayCreate", "Malloc", "HostAlloc"]) => {
                Some(Class::Alloc)
            }
            _ if begins(&["MemFree", "MemRelease", "ArrayDestroy", "Free"]) => Some(Class::Free),
            _ => None,
        }
    }
}

/// The name without what versions add: `_v2`, `_v10000`, `_ptsz`, `_ptds`.
fn without_version(call: &str) -> &str {
    let mut name = call;
    while let Some((front, end)) = name.rsplit_once('_') {
        let version = end.strip_prefix('v').is_some_and(|n| n.parse::<u32>().is_ok());
        if !version && !matches!(end, "ptsz" | "ptds") {
            break;
        }
        name = front;
    }
    name
}

/// What the file has.
pub struct Report {
    /// Steps that count: both anchors say so.
    pub steps: u64,
    /// From the end of the last step before them to the end of the last of them.
    pub ns: u64,
    /// What ended steps on the device, and how often that ran.
    pub device: (String, Tally),
    /// The call that starts a step.
    pub host: Tally,
    /// By kind of call.
    pub calls: BTreeMap<Class, Tally>,
    /// Graphs, where they were traced whole: their kernels are not in the file.
    pub graphs: Option<Tally>,
    /// By direction and bytes.
    pub copies: BTreeMap<(i64, u64), Tally>,
    /// By bytes.
    pub memsets: BTreeMap<u64, Tally>,
    /// By name, the longest time first.
    pub kernels: Vec<(String, Tally)>,
}

/// Counts. Errors: a sentence on what to do, also where the anchors disagree.
pub fn read(path: &Path, query: &Query<'_>) -> Result<Report> {
    let export = Export::open(path, query.time)?;
    if !export.has("StringIds", &["id", "value"])? {
        bail!("not an export of Nsight Systems, as it has no StringIds: make one with `nsys export --type sqlite`");
    }
    if !export.has_events(&CALLS)? {
        bail!("no CUDA calls were recorded: record with `{RECORD}`");
    }
    let names = export.names(query)?;
    let (what, ends) = export.steps(query, &names)?;
    let most = ends.len().saturating_sub(query.skip);
    let steps = query.steps.unwrap_or(most);
    if steps == 0 || steps > most {
        bail!(
            "{what} ran {} times, which is too few behind --skip {}: lower --skip or --steps",
            ends.len(),
            query.skip
        );
    }
    let (first, last) = (ends[query.skip - 1], ends[query.skip - 1 + steps]);
    let called = export.called(first, last)?;
    let (host, calls) = export.calls(&names, |call| called.0 < call.start && call.start <= called.1)?;
    if host.counted != steps as u64 {
        bail!(
            "the anchors disagree, so nothing is divided: {what} ran {steps} times behind --skip {}, but {} was called {} \
            times meanwhile ({} and {} in the whole file): name what happens once a step with --step-kernel and \
            --step-call, or leave out what differs with --skip and --steps",
            query.skip,
            query.step_call,
            host.counted,
            ends.len(),
            host.in_file(),
        );
    }
    // In the order of a stream, what belongs to a step ends with it.
    let counts = |event: Event| first.end < event.end && event.end <= last.end;
    let mut graphs = Tally::default();
    let (mut copies, mut memsets, mut kernels) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    export.visit(&GRAPHS, |event, _| graphs.add(counts(event), event))?;
    export.visit(&COPIES, |event, row| bounded(&mut copies, (row.get(4)?, bytes(row)?))?.add(counts(event), event))?;
    export.visit(&MEMSETS, |event, row| bounded(&mut memsets, bytes(row)?)?.add(counts(event), event))?;
    export.visit(&KERNELS, |event, row| bounded(&mut kernels, row.get(4)?)?.add(counts(event), event))?;
    Ok(Report {
        steps: host.counted,
        ns: last.end.abs_diff(first.end),
        device: (what, Tally { counted: host.counted, outside: ends.len() as u64 - host.counted, ..Tally::default() }),
        host,
        calls,
        graphs: (graphs.in_file() > 0).then_some(graphs),
        copies,
        memsets,
        kernels: export.named(&kernels)?,
    })
}

/// Bytes of a copy or memset.
fn bytes(row: &Row<'_>) -> Result<u64> {
    u64::try_from(row.get::<_, i64>(3)?).context("bytes are negative")
}

/// The tally of a key, of which there are not too many.
fn bounded<K: Ord>(tallies: &mut BTreeMap<K, Tally>, key: K) -> Result<&mut Tally> {
    if tallies.len() == MOST_NAMES && !tallies.contains_key(&key) {
        bail!("there are more than {MOST_NAMES} different names or sizes: record a shorter run");
    }
    Ok(tallies.entry(key).or_default())
}

/// When something happened, in nanoseconds.
#[derive(Debug, Clone, Copy)]
struct Event {
    start: i64,
    end: i64,
}

/// Where a step ends on the device, and what the call that launched its end is known by.
#[derive(Debug, Clone, Copy)]
struct StepEnd {
    end: i64,
    correlation: i64,
}

/// Ids of the names that matter.
struct Names {
    /// The kind of a call, and whether it starts a step.
    calls: HashMap<i64, (Option<Class>, bool)>,
    /// Of the kernel that ends a step.
    step_kernel: HashSet<i64>,
}

struct Export {
    db: Connection,
    /// The process that all events are of.
    process: Cell<Option<i64>>,
    time: Duration,
}

impl Export {
    fn open(path: &Path, time: Duration) -> Result<Export> {
        // A pipe would be waited for.
        if !fs::metadata(path).context("cannot open it")?.is_file() {
            bail!("not a file");
        }
        let absolute = std::path::absolute(path)?;
        let name = absolute.to_str().context("its name is not UTF-8: rename it")?;
        let name = name.replace('%', "%25").replace('?', "%3f").replace('#', "%23");
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let mut db = Connection::open_with_flags(format!("file://{name}?mode=ro&immutable=1"), flags)?;
        let until = Instant::now() + time;
        db.progress_handler(1000, Some(move || Instant::now() > until))?;
        db.set_limit(Limit::SQLITE_LIMIT_LENGTH, ROW_BYTES)?;
        db.set_db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true)?;
        db.set_db_config(DbConfig::SQLITE_DBCONFIG_TRUSTED_SCHEMA, false)?;
        let export = Export { db, process: Cell::new(None), time };
        let set = |pragma: &str, value: i64| {
            export.db.pragma_update(None, pragma, value).map_err(|e| export.told("the file", e.into()))
        };
        set("hard_heap_limit", HEAP_BYTES)?;
        set("cell_size_check", 1)?;
        Ok(export)
    }

    /// What went wrong in a table, and what to do.
    fn told(&self, table: &str, e: Error) -> Error {
        let Some(fault) = e.downcast_ref::<rusqlite::Error>() else { return e.context(format!("in {table}")) };
        match fault.sqlite_error_code() {
            Some(ErrorCode::NotADatabase) => anyhow!("not an SQLite file: make one with `nsys export --type sqlite`"),
            Some(ErrorCode::OperationInterrupted) => {
                anyhow!("reading takes more than {} s: record a shorter run", self.time.as_secs())
            }
            Some(ErrorCode::OutOfMemory) => {
                anyhow!("reading takes more than {} MiB, which no export of nsys needs", HEAP_BYTES >> 20)
            }
            _ => e.context(format!("{table} is not as nsys writes it")),
        }
    }

    /// Whether a table is there, with these columns.
    fn has(&self, table: &str, columns: &[&str]) -> Result<bool> {
        let look = || -> Result<bool> {
            // Views and virtual tables have no page. Computed columns are not listed by `table_info`.
            let sql = "SELECT type = 'table' AND rootpage > 0 FROM sqlite_schema WHERE name = ? COLLATE NOCASE \
                AND type IN ('table', 'view')";
            let mut kinds = self.db.prepare(sql)?;
            let Some(real) = kinds.query([table])?.next()?.map(|row| row.get::<_, bool>(0)).transpose()? else {
                return Ok(false);
            };
            if !real {
                bail!("it is not a table");
            }
            let mut statement = self.db.prepare("SELECT 1 FROM pragma_table_info(?) WHERE name = ?")?;
            for column in columns {
                if !statement.exists([table, column])? {
                    bail!("there is no column {column}");
                }
            }
            Ok(true)
        };
        look().map_err(|e| self.told(table, e))
    }

    fn has_events(&self, events: &Events) -> Result<bool> {
        self.has(events.table, &[&["start", "end", events.process], events.columns].concat())
    }

    /// Every row of a query.
    fn rows(&self, table: &str, sql: &str, mut each: impl FnMut(&Row<'_>) -> Result<()>) -> Result<()> {
        let mut run = || -> Result<()> {
            let mut statement = self.db.prepare(sql)?;
            let mut rows = statement.query([])?;
            while let Some(row) = rows.next()? {
                each(row)?;
            }
            Ok(())
        };
        run().map_err(|e| self.told(table, e))
    }

    /// Every event of a table, if it is there; its columns are behind the first three of the row.
    fn visit(&self, events: &Events, mut each: impl FnMut(Event, &Row<'_>) -> Result<()>) -> Result<()> {
        if !self.has_events(events)? {
            return Ok(());
        }
        let Events { table, process, columns, order } = events;
        let sql = format!("SELECT start, \"end\", {process}, {} FROM {table}{order}", columns.join(", "));
        self.rows(table, &sql, |row| {
            let event = Event { start: row.get(0)?, end: row.get(1)? };
            // Both are 0 where the time is not known.
            if event.start < 0 || event.end < event.start || event.end == 0 {
                bail!("an event lasts from {} to {}", event.start, event.end);
            }
            let process = row.get::<_, Option<i64>>(2)?.map(|id| id >> 24);
            if process.is_some() && self.process.replace(process).is_some_and(|other| Some(other) != process) {
                bail!("several processes used CUDA: record one of them");
            }
            each(event, row)
        })
    }

    /// Every name, with its id.
    fn strings(&self, mut each: impl FnMut(i64, &str) -> Result<()>) -> Result<()> {
        self.rows("StringIds", "SELECT id, value FROM StringIds", |row| {
            let value = row.get_ref(1)?.as_bytes().map_err(rusqlite::Error::from)?;
            each(row.get(0)?, &String::from_utf8_lossy(value))
        })
    }

    fn names(&self, query: &Query<'_>) -> Result<Names> {
        let mut names = Names { calls: HashMap::new(), step_kernel: HashSet::new() };
        let step_kernel = query.step_kernel.unwrap_or(STEP_KERNEL);
        self.strings(|id, name| {
            let call = without_version(name);
            let (class, starts) = (Class::of(call), call == without_version(query.step_call));
            if class.is_some() || starts {
                names.calls.insert(id, (class, starts));
            }
            if name == step_kernel {
                names.step_kernel.insert(id);
            }
            if names.calls.len() + names.step_kernel.len() > MOST_NAMES {
                bail!("there are more than {MOST_NAMES} names of calls");
            }
            Ok(())
        })?;
        Ok(names)
    }

    /// What ends steps on the device, and all these ends in their order.
    fn steps(&self, query: &Query<'_>, names: &Names) -> Result<(String, Vec<StepEnd>)> {
        if query.step_kernel.is_none() {
            let graphs = self.ends(&GRAPHS, |_| Ok(true))?;
            if !graphs.is_empty() {
                return Ok(("a graph".to_owned(), graphs));
            }
        }
        let kernel = query.step_kernel.unwrap_or(STEP_KERNEL);
        let kernels = self.ends(&KERNELS, |row| Ok(names.step_kernel.contains(&row.get(4)?)))?;
        if kernels.is_empty() {
            bail!(
                "no kernel {} ran, which ends a step: name another with --step-kernel, or record with `{RECORD}`, as \
                kernels inside of graphs are not there otherwise",
                kernel.escape_debug()
            );
        }
        Ok((kernel.to_owned(), kernels))
    }

    /// Ends of the events that end a step, in their order.
    fn ends(&self, events: &Events, ends_step: impl Fn(&Row<'_>) -> Result<bool>) -> Result<Vec<StepEnd>> {
        let mut ends = Vec::new();
        self.visit(events, |event, row| {
            if ends_step(row)? {
                if ends.len() == MOST_STEPS {
                    bail!("there are more than {MOST_STEPS} steps: record a shorter run");
                }
                ends.push(StepEnd { end: event.end, correlation: row.get(3)? });
            }
            Ok(())
        })?;
        ends.sort_unstable_by_key(|step| step.end);
        Ok(ends)
    }

    /// When the calls were made that launched the ends of two steps.
    fn called(&self, first: StepEnd, last: StepEnd) -> Result<(i64, i64)> {
        let mut starts = [None; 2];
        self.visit(&CALLS, |call, row| {
            let correlation = row.get::<_, Option<i64>>(3)?;
            for (start, step) in starts.iter_mut().zip([first, last]) {
                if correlation == Some(step.correlation) {
                    *start = Some(start.map_or(call.start, |other: i64| other.min(call.start)));
                }
            }
            Ok(())
        })?;
        match starts {
            [Some(first), Some(last)] if first < last => Ok((first, last)),
            _ => bail!("the calls that launched the first and the last step are not in order: record the whole run"),
        }
    }

    /// Calls that start a step, and all calls by kind.
    fn calls(&self, names: &Names, counts: impl Fn(Event) -> bool) -> Result<(Tally, BTreeMap<Class, Tally>)> {
        let mut steps = Tally::default();
        let mut calls: BTreeMap<Class, Tally> = Class::ALL.map(|class| (class, Tally::default())).into();
        // The outer call, when it ends, which kinds were counted since it began, and whether it started a step.
        let (mut outer, mut until, mut kinds, mut started) = (None, 0, BTreeSet::new(), false);
        self.visit(&CALLS, |call, row| {
            let (correlation, name): (Option<i64>, i64) = (row.get(3)?, row.get(4)?);
            // 0 is no id.
            if correlation.is_none_or(|id| id == 0) || correlation != outer || call.start > until {
                (outer, until, started) = (correlation, call.end, false);
                kinds.clear();
            }
            let Some(&(class, starts)) = names.calls.get(&name) else { return Ok(()) };
            if starts && !std::mem::replace(&mut started, true) {
                steps.add(counts(call), call)?;
            }
            match class {
                Some(class) if kinds.insert(class) => calls.entry(class).or_default().add(counts(call), call),
                _ => Ok(()),
            }
        })?;
        Ok((steps, calls))
    }

    /// Kernels with their names, those that took longest first.
    fn named(&self, kernels: &BTreeMap<i64, Tally>) -> Result<Vec<(String, Tally)>> {
        let mut names = HashMap::new();
        self.strings(|id, name| {
            if kernels.contains_key(&id) {
                names.insert(id, name.chars().take(NAME_MAX).collect());
            }
            Ok(())
        })?;
        let name = |id: &i64| names.get(id).cloned().unwrap_or_else(|| format!("name {id}"));
        let mut kernels: Vec<(String, Tally)> = kernels.iter().map(|(id, tally)| (name(id), *tally)).collect();
        kernels.sort_unstable_by(|(a, x), (b, y)| (y.ns, a).cmp(&(x.ns, b)));
        Ok(kernels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_known_without_their_versions() {
        for (call, name, class) in [
            ("cuGraphLaunch", "cuGraphLaunch", Some(Class::GraphLaunch)),
            ("cudaGraphLaunch_ptsz_v10000", "cudaGraphLaunch", Some(Class::GraphLaunch)),
            ("cuLaunchKernelEx_ptsz", "cuLaunchKernelEx", Some(Class::Launch)),
            ("cudaLaunchKernelExC_v11060", "cudaLaunchKernelExC", Some(Class::Launch)),
            ("cuLaunchHostFunc", "cuLaunchHostFunc", None),
            ("cuMemcpyHtoDAsync_v2_ptsz", "cuMemcpyHtoDAsync", None),
            ("cudaMemcpy_v3020", "cudaMemcpy", Some(Class::BlockingCopy)),
            ("cuMemAlloc_v2", "cuMemAlloc", Some(Class::Alloc)),
            ("cudaMallocAsync_v11020", "cudaMallocAsync", Some(Class::Alloc)),
            ("cuMemFreeHost", "cuMemFreeHost", Some(Class::Free)),
            ("cudaDeviceSynchronize_v3020", "cudaDeviceSynchronize", Some(Class::Wait)),
            ("cuStreamQuery", "cuStreamQuery", None),
            ("step_commit", "step_commit", None),
            ("odd_v", "odd_v", None),
        ] {
            assert_eq!((without_version(call), Class::of(name)), (name, class), "{call}");
        }
    }

    #[test]
    fn reading_ends_in_time() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let path = dir.path().join("run.sqlite");
        let db = Connection::open(&path).expect("a file can be made");
        let sql = "CREATE TABLE StringIds (id, value);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId);
            WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n LIMIT 10000)
                INSERT INTO StringIds SELECT i, 'a name' FROM n";
        db.execute_batch(sql).expect("the schema is ours");
        let refusal = |time| {
            let query = Query { step_kernel: None, step_call: "cuGraphLaunch", skip: 1, steps: None, time };
            read(&path, &query).err().expect("there are no steps").to_string()
        };
        assert!(refusal(Duration::from_secs(60)).starts_with("no kernel step_commit ran"));
        assert!(refusal(Duration::ZERO).starts_with("reading takes more than 0 s"));
    }
}
