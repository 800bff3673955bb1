//! `arc profile`, on exports whose answer is known: the schema is that of nsys 2024.6, the run is made up.

mod common;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use common::{arc, output_with, refused};
use rusqlite::{Connection, params};
use serde_json::{Value, json};
use tempfile::TempDir;

const QUICK: Duration = Duration::from_secs(5);
const PROCESS: i64 = (7 << 56 | 4321) << 24;
/// Steps of the warm-up, and behind it.
const WARM_UP: i64 = 3;
const STEPS: i64 = 40;
/// From one step to the next, on the device and on the host, which runs ahead. Nanoseconds.
const PERIOD: i64 = 130_000;
const CALL: i64 = 10_000;
const BEGIN: i64 = 5_000_000;
/// Correlation id of the launch of step 20, counted from 0 behind the warm-up.
const STEP_20: i64 = 1000 + WARM_UP + 20;

const SCHEMA: &str = "
    CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
    CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT);
    CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
        globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL,
        callchainId INTEGER);
    CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
        streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL,
        shortName INTEGER NOT NULL, gridX INTEGER, graphNodeId INTEGER);
    CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
        streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL,
        copyKind INTEGER NOT NULL, graphNodeId INTEGER);
    CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
        streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, value INTEGER NOT NULL,
        bytes INTEGER NOT NULL, graphNodeId INTEGER);";
/// There with graphs that were traced whole.
const GRAPH_TRACE: &str = "
    CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
        streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, graphId INTEGER NOT NULL,
        graphExecId INTEGER NOT NULL);";

/// An export in the making.
struct Export {
    db: Connection,
    names: Vec<String>,
    correlation: i64,
}

impl Export {
    fn name(&mut self, name: &str) -> i64 {
        if let Some(at) = self.names.iter().position(|n| n == name) {
            return at as i64;
        }
        self.names.push(name.to_owned());
        let id = self.names.len() as i64 - 1;
        self.db.execute("INSERT INTO StringIds VALUES (?, ?)", params![id, name]).expect("the schema is ours");
        id
    }

    /// A call of 4 us, with the next correlation id.
    fn call(&mut self, name: &str, start: i64) -> i64 {
        self.correlation += 1;
        let (id, correlation) = (self.name(name), self.correlation);
        let sql = "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 1, ?, ?, ?, 0, NULL)";
        let row = params![start, start + 4_000, PROCESS + 99, correlation, id];
        self.db.execute(sql, row).expect("the schema is ours");
        correlation
    }

    fn kernel(&mut self, name: &str, start: i64, ns: i64, correlation: i64) {
        let id = self.name(name);
        let sql = "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 7, ?, ?, ?, ?, 1, NULL)";
        self.db.execute(sql, params![start, start + ns, correlation, PROCESS, id, id]).expect("the schema is ours");
    }

    fn copy(&mut self, start: i64, bytes: i64, kind: i64, correlation: i64) {
        let sql = "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, 0, 7, ?, ?, ?, ?, NULL)";
        self.db
            .execute(sql, params![start, start + 800, correlation, PROCESS, bytes, kind])
            .expect("the schema is ours");
    }
}

/// Writes the run: a load, three kernels, three steps of a warm-up, 40 steps, an end. `whole`: graphs are traced whole.
/// `change`: SQL at the end.
fn export(dir: &TempDir, whole: bool, change: &str) -> PathBuf {
    let path = dir.path().join("run #1?.sqlite");
    let _ = fs::remove_file(&path);
    let db = Connection::open(&path).expect("a file can be made");
    db.execute_batch(&format!("PRAGMA journal_mode=OFF; BEGIN; {SCHEMA}")).expect("the schema is ours");
    if whole {
        db.execute_batch(GRAPH_TRACE).expect("the schema is ours");
    }
    let mut run = Export { db, names: Vec::new(), correlation: 900 };
    // In this order, so that changes may name them by id.
    for name in ["cuGraphLaunch", "step_commit", "step_begin", "matmul"] {
        run.name(name);
    }
    run.call("cuMemAlloc_v2", 1_000);
    run.call("cuMemHostAlloc", 6_000);
    run.call("cuMemHostAlloc", 11_000);
    let memset = run.call("cuMemsetD8Async", 16_000);
    let sql = "INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (18000, 19000, 0, 7, ?, ?, 0, 4096, NULL)";
    run.db.execute(sql, params![memset, PROCESS]).expect("the schema is ours");
    let copy = run.call("cuMemcpyHtoDAsync_v2", 21_000);
    run.copy(23_000, 1 << 20, 1, copy);
    run.call("cuStreamSynchronize", 26_000);
    for i in 0..3 {
        let launch = run.call("cuLaunchKernelEx", 40_000 + i * 5_000);
        run.kernel("probe", 42_000 + i * 5_000, 2_000, launch);
    }
    run.correlation = 999;
    for step in 0..WARM_UP + STEPS {
        let (host, device) = (BEGIN + step * CALL, BEGIN + 20_000 + step * PERIOD);
        let counted = step - WARM_UP;
        let launch = {
            // Ids of graph launches are those of the steps, whatever comes between.
            run.correlation = 999 + step;
            run.call("cuGraphLaunch", host)
        };
        run.correlation = 5_000 + 10 * step;
        if counted >= 0 && counted % 8 == 0 {
            let copy = run.call("cuMemcpyHtoDAsync_v2", host - 5_500);
            run.copy(device - 9_000, 1_024, 1, copy);
            let apply = run.call("cuLaunchKernelEx_ptsz", host - 4_500);
            run.kernel("step_apply", device - 8_000, 3_000, apply);
        }
        if counted == 20 {
            run.call("cuStreamSynchronize", host - 5_000);
        }
        if whole {
            let sql = "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (?, ?, 0, 7, ?, ?, 3, 5)";
            run.db.execute(sql, params![device, device + 100_000, launch, PROCESS]).expect("the schema is ours");
        } else {
            run.kernel("step_begin", device, 10_000, launch);
            // One kernel begins while the other runs.
            run.kernel("matmul", device + 5_000, 75_000, launch);
            run.kernel("step_commit", device + 80_000, 20_000, launch);
        }
    }
    run.correlation = 9_000;
    let end = BEGIN + (WARM_UP + STEPS + 1) * PERIOD;
    let copy = run.call("cuMemcpyDtoH_v2", end);
    run.copy(end + 1_000, 4, 2, copy);
    run.call("cuMemFree_v2", end + 10_000);
    run.db.execute_batch(&format!("{change}; COMMIT")).unwrap_or_else(|e| panic!("{change}: {e}"));
    path
}

fn profile(path: &Path, args: &[&str]) -> Command {
    let mut command = arc();
    command.arg("profile").arg("--nsys-sqlite").arg(path).args(args);
    command
}

fn report(path: &Path, args: &[&str]) -> Value {
    let output = output_with(profile(path, &["--json"]).args(args), b"");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// A line of the report: how often, that a step, how often outside, microseconds a step.
fn line(mut key: Value, count: u64, per_step: f64, outside: u64, us_per_step: f64) -> Value {
    let all = json!({"count": count, "per_step": per_step, "outside": outside, "us_per_step": us_per_step});
    key.as_object_mut().expect("an object").extend(all.as_object().expect("an object").clone());
    key
}

fn calls() -> Value {
    json!({
        "launches": line(json!({}), 5, 0.125, 3, 0.5),
        "graph_launches": line(json!({}), 40, 1.0, 3, 4.0),
        "waits": line(json!({}), 1, 0.025, 1, 0.1),
        "blocking_copies": line(json!({}), 0, 0.0, 1, 0.0),
        "allocs": line(json!({}), 0, 0.0, 3, 0.0),
        "frees": line(json!({}), 0, 0.0, 1, 0.0),
    })
}

fn copies() -> Value {
    json!([
        line(json!({"direction": "host to device", "bytes": 1024}), 5, 0.125, 0, 0.1),
        line(json!({"direction": "host to device", "bytes": 1 << 20}), 0, 0.0, 1, 0.0),
        line(json!({"direction": "device to host", "bytes": 4}), 0, 0.0, 1, 0.0),
    ])
}

#[test]
fn a_known_run_has_its_known_counts() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = export(&dir, false, "");
    let expected = json!({
        "file": path.display().to_string(),
        "steps": 40,
        "skipped": 3,
        "step_us": 130.0,
        "anchors": {
            "device": {"what": "step_commit", "count": 40, "in_file": 43},
            "host": {"what": "cuGraphLaunch", "count": 40, "in_file": 43},
        },
        "calls": calls(),
        "copies": copies(),
        "memsets": [line(json!({"bytes": 4096}), 0, 0.0, 1, 0.0)],
        "graphs": null,
        "kernels": [
            line(json!({"name": "matmul"}), 40, 1.0, 3, 75.0),
            line(json!({"name": "step_commit"}), 40, 1.0, 3, 20.0),
            line(json!({"name": "step_begin"}), 40, 1.0, 3, 10.0),
            line(json!({"name": "step_apply"}), 5, 0.125, 0, 0.375),
            line(json!({"name": "probe"}), 0, 0.0, 3, 0.0),
        ],
    });
    assert_eq!(report(&path, &["--skip", "3"]), expected);

    // Counting begins at the end of a step: behind one, two steps of the warm-up count.
    let wide = report(&path, &[]);
    assert_eq!((&wide["steps"], &wide["calls"]["graph_launches"]["outside"]), (&json!(42), &json!(1)));
    // Steps 12 to 21, counted from 1: one copy, and the wait.
    let narrow = report(&path, &["--skip", "14", "--steps", "10"]);
    let found = (&narrow["steps"], &narrow["copies"][0]["count"], &narrow["calls"]["waits"]["per_step"]);
    assert_eq!(found, (&json!(10), &json!(1), &json!(0.1)));
    assert_eq!(narrow["anchors"]["host"], json!({"what": "cuGraphLaunch", "count": 10, "in_file": 43}));

    // The launch of the last step counts, that of the step in front does not.
    let longer = "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET end = end + 400 WHERE correlationId = 1042;
        UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET end = end + 4000 WHERE correlationId = 1002";
    let found = report(&export(&dir, false, longer), &["--skip", "3"]);
    assert_eq!(found["calls"]["graph_launches"], line(json!({}), 40, 1.0, 3, 4.01));

    let output = output_with(&mut profile(&export(&dir, false, ""), &["--skip", "3"]), b"");
    let page = String::from_utf8(output.stdout).expect("output is UTF-8");
    let has = |words: &[&str]| page.lines().any(|l| l.split_whitespace().eq(words.iter().copied()));
    assert!(page.contains(": 40 steps of 130.0 us, behind 3 that do not count\n"), "{page}");
    assert!(has(&["host", "to", "device,", "1024", "B", "5", "0.125", "0.1", "0"]), "{page}");
    assert!(has(&["matmul", "40", "1.000", "75.0", "3"]) && has(&["waits", "1", "0.025", "0.1", "1"]), "{page}");
}

#[test]
fn graphs_that_were_traced_whole_are_steps() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = export(&dir, true, "");
    let found = report(&path, &["--skip", "3"]);
    assert_eq!(found["anchors"]["device"], json!({"what": "a graph", "count": 40, "in_file": 43}));
    assert_eq!(found["graphs"], line(json!({}), 40, 1.0, 3, 100.0));
    assert_eq!((&found["calls"], &found["copies"], &found["step_us"]), (&calls(), &copies(), &json!(130.0)));
    let kernels = json!([
        line(json!({"name": "step_apply"}), 5, 0.125, 0, 0.375),
        line(json!({"name": "probe"}), 0, 0.0, 3, 0.0),
    ]);
    assert_eq!(found["kernels"], kernels);
    refused(&mut profile(&path, &["--step-kernel", "step_commit"]), b"", 1, "--cuda-graph-trace=node", QUICK);
    let path =
        export(&dir, true, &format!("DELETE FROM CUPTI_ACTIVITY_KIND_GRAPH_TRACE WHERE correlationId = {STEP_20}"));
    refused(&mut profile(&path, &["--skip", "3"]), b"", 1, "a graph ran 39 times", QUICK);
}

#[test]
fn anchors_that_disagree_are_told_and_nothing_is_divided() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let lost = format!("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE shortName = 1 AND correlationId = {STEP_20}");
    let path = export(&dir, false, &lost);
    let told = "the anchors disagree, so nothing is divided: step_commit ran 39 times behind --skip 3, but cuGraphLaunch \
        was called 40 times meanwhile (42 and 43 in the whole file)";
    refused(&mut profile(&path, &["--skip", "3"]), b"", 1, told, QUICK);
    // Where the two agree, they are enough.
    assert_eq!(report(&path, &["--skip", "3", "--steps", "20"])["steps"], 20);
    assert_eq!(report(&path, &["--skip", "24"])["steps"], 18);

    // Replays that end no step, as of a step of two graphs: refused where they are among the steps, told apart before.
    let launch = |start: i64, id: i64| {
        format!(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES ({start}, {start} + 1000, 1, {PROCESS}, {id}, 0, 0, NULL);"
        )
    };
    let path = export(&dir, false, &launch(BEGIN + 20 * CALL + 4_500, 8_000));
    refused(&mut profile(&path, &["--skip", "3"]), b"", 1, "was called 41 times", QUICK);
    let path = export(&dir, false, &[launch(100_000, 8_000), launch(200_000, 8_001)].concat());
    let found = report(&path, &["--skip", "3"]);
    assert_eq!(found["anchors"]["host"], json!({"what": "cuGraphLaunch", "count": 40, "in_file": 45}));
}

/// A program of the runtime, some of whose calls are seen a second time where they call the driver.
#[test]
fn other_programs_name_their_anchors() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let change = "UPDATE StringIds SET value = 'cudaGraphLaunch_ptsz_v10000' WHERE id = 0;
        UPDATE StringIds SET value = 'sample_end' WHERE id = 1;
        INSERT INTO StringIds VALUES (1000, 'cuGraphLaunch'), (1001, 'cudaLaunchHostFunc_v10000'),
            (1002, 'cudaGraphLaunch');
        INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME
            SELECT start, end, 0, globalTid, correlationId, 1002, 0, NULL FROM CUPTI_ACTIVITY_KIND_RUNTIME
            WHERE nameId = 0;
        INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME
            SELECT start + 100, end - 100, 0, globalTid, correlationId, 1000, 0, NULL FROM CUPTI_ACTIVITY_KIND_RUNTIME
            WHERE nameId = 0;
        INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME
            SELECT start + 5000, end + 5000, 0, globalTid, 0, 1001, 0, NULL FROM CUPTI_ACTIVITY_KIND_RUNTIME
            WHERE nameId = 0";
    let path = export(&dir, false, change);
    let anchors = ["--step-kernel", "sample_end", "--step-call", "cudaGraphLaunch", "--skip", "3"];
    let found = report(&path, &anchors);
    assert_eq!(found["anchors"]["device"], json!({"what": "sample_end", "count": 40, "in_file": 43}));
    assert_eq!(found["calls"], calls());
    assert_eq!(found["calls"], report(&path, &["--step-kernel", "sample_end", "--skip", "3"])["calls"]);
    refused(&mut profile(&path, &[]), b"", 1, "no kernel step_commit ran", QUICK);
    let none = ["--step-kernel", "sample_end", "--step-call", "cuLaunchKernel"];
    refused(&mut profile(&path, &none), b"", 1, "cuLaunchKernel was called 0 times", QUICK);

    // Calls without an id are nobody's, also where two threads make them at once.
    let threads = "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME
        SELECT start, end, 0, globalTid, 0, nameId, 0, NULL FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE start = 1000;
        INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME
        SELECT start, end, 0, globalTid + 1, 0, nameId, 0, NULL FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE start = 1000";
    let found = report(&export(&dir, false, threads), &["--skip", "3"]);
    assert_eq!(found["calls"]["allocs"], line(json!({}), 0, 0.0, 6, 0.0));
    // Nor are calls one that share an id and not their time.
    let shared = "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET correlationId = 77
        WHERE correlationId NOT BETWEEN 1000 AND 1042";
    assert_eq!(report(&export(&dir, false, shared), &["--skip", "3"])["calls"], calls());
}

#[test]
fn files_that_are_no_exports_are_refused() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let no_sqlite = dir.path().join("run.nsys-rep");
    fs::write(&no_sqlite, [7; 5000]).expect("the temporary folder is writable");
    let empty = dir.path().join("empty.sqlite");
    fs::write(&empty, "").expect("the temporary folder is writable");
    refused(&mut profile(&no_sqlite, &[]), b"", 1, "nsys export --type sqlite", QUICK);
    refused(&mut profile(&empty, &[]), b"", 1, "it has no StringIds", QUICK);
    refused(&mut profile(dir.path(), &[]), b"", 1, "not a file", QUICK);
    refused(&mut profile(&dir.path().join("none"), &[]), b"", 1, "cannot open it", QUICK);
    refused(arc().arg("profile"), b"", 2, "--nsys-sqlite", QUICK);
    let cases = [
        (
            "DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME",
            "no CUDA calls were recorded: record with `nsys profile --trace=cuda",
        ),
        ("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL", "no kernel step_commit ran"),
        ("ALTER TABLE CUPTI_ACTIVITY_KIND_MEMCPY DROP COLUMN copyKind", "there is no column copyKind"),
        ("DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE correlationId = 1000", "record the whole run"),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET globalPid = 1 << 30 WHERE shortName = 3", "several processes"),
    ];
    for (change, part) in cases {
        refused(&mut profile(&export(&dir, false, change), &[]), b"", 1, part, QUICK);
    }
    let path = export(&dir, false, "");
    refused(&mut profile(&path, &["--skip", "43"]), b"", 1, "lower --skip or --steps", QUICK);
    refused(&mut profile(&path, &["--skip", "3", "--steps", "41"]), b"", 1, "lower --skip or --steps", QUICK);
    refused(&mut profile(&path, &["--skip", "0"]), b"", 2, "--skip", QUICK);
}

#[test]
fn files_that_lie_are_refused_or_counted_right() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let kernels = "CUPTI_ACTIVITY_KIND_KERNEL";
    let copies = "CUPTI_ACTIVITY_KIND_MEMCPY";
    let loose = |table: &str| {
        format!("CREATE TABLE x AS SELECT * FROM {table}; DROP TABLE {table}; ALTER TABLE x RENAME TO {table}")
    };
    let cases = [
        (format!("UPDATE {kernels} SET start = 'soon' WHERE rowid = 9"), "name: start"),
        (format!("UPDATE {kernels} SET end = 1.5e300 WHERE rowid = 9"), "name: end"),
        (format!("{}; UPDATE {kernels} SET end = NULL WHERE rowid = 9", loose(kernels)), "name: end"),
        (format!("UPDATE {kernels} SET correlationId = NULL WHERE shortName = 1"), "name: correlationId"),
        (format!("UPDATE {kernels} SET start = -5 WHERE rowid = 9"), "lasts from -5 to"),
        (format!("UPDATE {kernels} SET end = 3 WHERE rowid = 9"), "to 3"),
        (format!("UPDATE {kernels} SET start = 0, end = 0 WHERE rowid = 9"), "lasts from 0 to 0"),
        (format!("UPDATE {copies} SET bytes = -1"), "bytes are negative"),
        (format!("UPDATE {copies} SET bytes = 'all of them'"), "name: bytes"),
        (
            format!("UPDATE {kernels} SET start = 0, end = {} WHERE correlationId BETWEEN 1035 AND 1042", i64::MAX),
            "more than a number can hold",
        ),
        ("UPDATE StringIds SET value = x'ff00' WHERE id = 0".to_owned(), "was called 0 times"),
        (
            "UPDATE StringIds SET value = zeroblob(3000000) WHERE id = 3".to_owned(),
            "StringIds is not as nsys writes it",
        ),
        (format!("ALTER TABLE {kernels} RENAME TO x; CREATE VIEW {kernels} AS SELECT * FROM x"), "it is not a table"),
        (
            format!("DROP TABLE {copies}; CREATE VIRTUAL TABLE {copies} USING fts5(start, \"end\", bytes, copyKind)"),
            "it is not a table",
        ),
        (
            format!("ALTER TABLE {copies} DROP COLUMN bytes; ALTER TABLE {copies} ADD bytes AS (streamId * 2)"),
            "there is no column bytes",
        ),
        (
            "WITH RECURSIVE n(i) AS (SELECT 100000 UNION ALL SELECT i + 1 FROM n LIMIT 20000)
                INSERT INTO StringIds SELECT i, 'cuMemAlloc_v' || i FROM n"
                .to_owned(),
            "names of calls",
        ),
    ];
    for (change, part) in cases {
        refused(&mut profile(&export(&dir, false, &change), &["--skip", "3"]), b"", 1, part, QUICK);
    }
    // Two million columns would be 100 MB.
    let columns = (0..1900).map(|i| format!("c{i}")).collect::<Vec<_>>().join(",");
    let wide: String = (0..1000).map(|i| format!("CREATE TABLE t{i} ({columns});")).collect();
    refused(&mut profile(&export(&dir, false, &wide), &["--skip", "3"]), b"", 1, "more than 32 MiB", QUICK);
    let harmless = format!(
        "CREATE TRIGGER t BEFORE INSERT ON {kernels} BEGIN DELETE FROM StringIds; END;
        CREATE VIEW v AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT * FROM n;
        CREATE INDEX i ON {kernels}(end DESC); {}",
        loose(copies)
    );
    let expected = report(&export(&dir, false, ""), &["--skip", "3"]);
    assert_eq!(report(&export(&dir, false, &harmless), &["--skip", "3"]), expected);
}

/// A million calls and as many kernels between the steps, in 64 MiB; then as many names.
#[test]
fn a_million_rows_are_counted_in_little_memory() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let rows = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n LIMIT 1000000)";
    let (host, device) = (BEGIN + (WARM_UP + 1) * CALL, BEGIN + 20_000 + (WARM_UP + 1) * PERIOD);
    let many = |name: &str| {
        format!(
            "INSERT INTO StringIds VALUES (1000, 'cuLaunchKernel');
            {rows} INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME
                SELECT {host}, {host} + 1, 0, {PROCESS}, 10000000 - i, 1000, 0, NULL FROM n;
            {rows} INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL
                SELECT {device}, {device} + 1, 0, 7, 10000000 - i, {PROCESS}, 3, {name}, 1, NULL FROM n"
        )
    };
    let limited = |path: &Path| {
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -d 65536; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_arc"), "profile", "--json"]);
        command.args(["--skip", "3", "--nsys-sqlite"]).arg(path).env("HOME", "/nonexistent");
        command
    };
    let output = output_with(&mut limited(&export(&dir, false, &many("3"))), b"");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(found["calls"]["launches"]["count"], 1_000_005);
    assert_eq!((&found["kernels"][0]["name"], &found["kernels"][0]["count"]), (&json!("matmul"), &json!(1_000_040)));
    let long = Duration::from_secs(60);
    refused(&mut limited(&export(&dir, false, &many("2000 + i"))), b"", 1, "different names or sizes", long);
}

/// Damaged bytes are an error of one sentence, or no error.
#[test]
fn damaged_files_end_in_one_sentence() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let good = fs::read(export(&dir, false, "")).expect("it was written");
    let path = dir.path().join("damaged.sqlite");
    let (mut state, mut refusals) = (1u64, 0);
    let mut next = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    for case in 0..80 {
        let mut bytes = good.clone();
        for _ in 0..20 {
            // The header and the schema are in front.
            let at = next(if case % 2 == 0 { 4096 } else { bytes.len() });
            bytes[at] = next(256) as u8;
        }
        fs::write(&path, bytes).expect("the temporary folder is writable");
        let output = output_with(&mut profile(&path, &["--skip", "3"]), b"");
        let stderr = String::from_utf8(output.stderr).expect("messages are UTF-8");
        match output.status.code() {
            Some(0) => {}
            Some(1) => refusals += 1,
            code => panic!("case {case}: {code:?}: {stderr}"),
        }
        assert!(stderr.lines().count() <= 1 && !stderr.contains("panicked"), "case {case}: {stderr}");
    }
    assert!(refusals > 20, "{refusals} of 80 were damaged enough to be refused");
}
