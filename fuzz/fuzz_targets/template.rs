//! Any text as a chat template: refused, or rendered, or given up in time.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = arc::text::testing::exercise_template(bytes);
});
