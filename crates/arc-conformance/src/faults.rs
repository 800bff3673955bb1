//! Faults of the whole device, each injected for real. A poisoned context does not heal, so what poisons one runs in a
//! process of its own.

use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use arc_device::error::DeviceError;
use arc_device::step::{CtxClass, Part, Row, StepDelta, StepKey, row_flags};
use arc_device::{Landing, Ops, Steps, StreamState};

use crate::suite::{Suite, Verdict, limits, shape};

/// How long a fault may stay unnoticed.
const SOON: Duration = Duration::from_secs(1);

/// What must be noticed, and by what.
pub fn cases(suite: &mut Suite) {
    suite.case("faults/trap", trap);
    suite.case("faults/lost_step", lost_step);
}

/// A kernel that traps: the child sees an error of the stream at its next look, and again at every later one.
fn trap(suite: &Suite) -> Verdict {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let output = Command::new(program)
        .args(["--child", "trap", &suite.ordinal().to_string()])
        .output()
        .map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if output.status.success() && !said.is_empty() { Ok(said) } else { Err(format!("{output:?}")) }
}

/// The process in which the context is poisoned.
pub fn child(args: &[String]) -> ExitCode {
    let ordinal = args.get(1).and_then(|n| n.parse().ok()).unwrap_or(0);
    match trapped(ordinal) {
        Ok(said) => {
            println!("{said}");
            ExitCode::SUCCESS
        }
        Err(why) => {
            println!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn trapped(ordinal: usize) -> Verdict {
    let text = |error: DeviceError| error.to_string();
    let suite = Suite::new(ordinal, false, Vec::new(), Vec::new());
    let mut gpu = suite.gpu(limits(1, 32)).map_err(text)?;
    arc_device::Alloc::finish(&mut gpu, &shape(64, 64)).map_err(text)?;
    gpu.inject_trap().map_err(text)?;
    let started = Instant::now();
    let error = loop {
        match gpu.poll() {
            Err(error) => break error,
            Ok(_) if started.elapsed() > SOON => return Err("a trap went unnoticed for a second".to_owned()),
            Ok(_) => {}
        }
    };
    let took = started.elapsed();
    let padding = Row { flags: row_flags::PADDING, ..Row::default() };
    let again =
        gpu.poll().is_err() && gpu.stage(&StepDelta { rows: Some(vec![padding]), ..StepDelta::default() }).is_err();
    if again { Ok(format!("after {} us: {error}", took.as_micros())) } else { Err("a later call succeeded".to_owned()) }
}

/// A step that is never committed: the stream runs dry, and the head says that a step is missing.
fn lost_step(suite: &Suite) -> Verdict {
    let text = |error: DeviceError| error.to_string();
    let mut gpu = suite.gpu(limits(1, 32)).map_err(text)?;
    arc_device::Alloc::finish(&mut gpu, &shape(64, 64)).map_err(text)?;
    let padding = Row { flags: row_flags::PADDING, ..Row::default() };
    gpu.stage(&StepDelta { rows: Some(vec![padding]), ..StepDelta::default() }).map_err(text)?;
    let key = StepKey::new(1, 1, CtxClass::Short, Part::Whole);
    let first = gpu.step(key, &mut |dev| dev.commit(1, 1)).map_err(text)?;
    let second = gpu.step(key, &mut |_| Ok(())).map_err(text)?;
    let started = Instant::now();
    while gpu.poll().map_err(text)? == StreamState::Busy {
        if started.elapsed() > SOON {
            return Err("two empty steps took more than a second".to_owned());
        }
    }
    let head = Landing::head(&gpu);
    if (head, first, second) == (1, 1, 2) {
        Ok("idle with 1 of 2 steps landed".to_owned())
    } else {
        Err(format!("idle with {head} landed; steps {first} and {second}"))
    }
}
