//! Any bytes as a GGUF file: refused, or every key, value and tensor can be used.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = arc_engine::load::testing::exercise_gguf(bytes);
});
