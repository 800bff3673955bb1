//! A run without a GPU says so, and does not pass where one was required. Cases can be named without one.

use std::process::{Command, Output};

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_arc-conformance")).args(args).output().expect("the program starts")
}

#[test]
fn without_a_gpu_nothing_passes_that_requires_one() {
    let (asked, required) = (run(&["state/tables/0"]), run(&["--require-gpu", "state/tables/0"]));
    let said = String::from_utf8_lossy(&required.stderr).into_owned();
    assert_eq!(asked.status.code(), Some(0), "{asked:?}");
    match required.status.code() {
        Some(0) => assert!(String::from_utf8_lossy(&required.stdout).contains("1 passed"), "{required:?}"),
        Some(2) => assert!(said.contains("skipped: every case, since no cuda device: "), "{said}"),
        code => panic!("{code:?}: {required:?}"),
    }
}

#[test]
fn a_wrong_option_is_told() {
    let output = run(&["--requires-gpu"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("unknown option --requires-gpu"), "{output:?}");
    assert_eq!(run(&["--help"]).status.code(), Some(0));
}

#[test]
fn a_name_that_no_case_has_is_told() {
    let output = run(&["--list", "no such case"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains(r#"no case has ["no such case"]"#), "{output:?}");
}

#[test]
fn every_case_has_a_name_of_its_own() {
    let output = run(&["--list"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut names: Vec<&str> = said.lines().collect();
    assert!(names.len() > 500, "{} cases", names.len());
    names.sort_unstable();
    let twice: Vec<&str> = names.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| pair[0]).collect();
    assert!(twice.is_empty(), "{twice:?}");
}
