//! The `arc` command.
#![forbid(unsafe_code)]
fn main() {}
