//! Any text as a chat request: refused, or an answer can be drawn that follows its tools or its `response_format`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(init: forgive(), |bytes: &[u8]| {
    let _ = arc::serve::testing::exercise_form(bytes);
});

/// A schema that makes the compiler panic on its own thread is refused; every other panic is a finding.
fn forgive() {
    let abort = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if std::thread::current().name() != Some("json-schema") {
            abort(panic);
        }
    }));
}
