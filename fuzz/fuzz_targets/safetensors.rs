//! Any bytes as a safetensors file, as the header of one, and as an index of shards: refused, or all of it can be used.
#![no_main]

use arc_engine::load::testing::{exercise_index, exercise_safetensors, safetensors_bytes};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = exercise_safetensors(bytes);
    let _ = exercise_safetensors(&safetensors_bytes(bytes, &[0; 16]));
    let _ = exercise_index(bytes);
});
