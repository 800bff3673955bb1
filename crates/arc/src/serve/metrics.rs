//! `/metrics`: counters in the Prometheus text format.
//!
//! The engine counts its own work; what is counted here is HTTP. The format is a few lines of text, so it is written by
//! hand: names and help stand beside the numbers they are about.

use std::{
    collections::BTreeMap,
    fmt::Write,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicI64, Ordering},
    },
};

use arc_device::count::Counters;
use arc_device::ops::sample::Declined;
use arc_engine::stats::{
    EngineStats,
    histogram::{BOUNDS_US, Histogram},
    split::StepSplit,
};

/// What the HTTP side counts.
#[derive(Debug, Default)]
pub struct Metrics {
    /// By route and status. Routes are the router's own names, so that clients cannot make new series.
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
    in_flight: AtomicI64,
    blocked: AtomicI64,
}

impl Metrics {
    /// A request has begun.
    pub fn begin(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    /// A request's body has ended, or its client has gone.
    pub fn end(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }

    /// A request was answered with this status.
    pub fn answered(&self, route: &'static str, status: u16) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        *requests.entry((route, status)).or_default() += 1;
    }

    /// A client takes nothing of what it is sent.
    pub fn blocked(&self) {
        self.blocked.fetch_add(1, Ordering::Relaxed);
    }

    /// It has taken some, or has gone.
    pub fn unblocked(&self) {
        self.blocked.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether nobody waits for an answer, or for the rest of one.
    pub fn is_quiet(&self) -> bool {
        self.in_flight.load(Ordering::Relaxed) == 0 && self.blocked.load(Ordering::Relaxed) == 0
    }

    /// The page.
    pub fn render(&self, engine: &EngineStats, model: &str) -> String {
        let mut page = Page::default();
        page.family("arc_info", "gauge", "1, with what is served");
        page.line("arc_info", &format!("{{version=\"{}\",model=\"{}\"}}", env!("CARGO_PKG_VERSION"), escape(model)), 1);
        page.family("arc_http_requests_total", "counter", "HTTP requests by route and status");
        for ((route, status), n) in self.requests.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            page.line("arc_http_requests_total", &format!("{{route=\"{route}\",status=\"{status}\"}}"), n);
        }
        page.one(
            "arc_http_requests_in_flight",
            "gauge",
            "HTTP requests not yet answered to the end",
            self.in_flight.load(Ordering::Relaxed),
        );
        page.one(
            "arc_http_connections_blocked",
            "gauge",
            "Connections whose clients take nothing of what they are sent",
            self.blocked.load(Ordering::Relaxed),
        );
        engine_lines(&mut page, engine);
        page.0
    }
}

fn engine_lines(page: &mut Page, s: &EngineStats) {
    page.one("arc_requests_submitted_total", "counter", "Sequences accepted by the engine", s.submitted);
    page.one("arc_requests_refused_total", "counter", "Sequences refused because the queue was full", s.refused_full);
    page.family("arc_requests_finished_total", "counter", "Sequences that ended, by reason");
    let f = &s.finished;
    for (reason, n) in [("stop", f.stop), ("length", f.length), ("cancelled", f.cancelled), ("error", f.error)] {
        page.line("arc_requests_finished_total", &format!("{{reason=\"{reason}\"}}"), n);
    }
    page.one("arc_requests_waiting", "gauge", "Sequences waiting for admission", s.queued);
    page.one("arc_requests_waiting_max", "gauge", "Most sequences that may wait", s.queue_cap);
    page.one("arc_requests_running", "gauge", "Sequences in slots", s.running);
    page.one("arc_slots", "gauge", "Slots", s.slots);
    page.one("arc_kv_blocks_used", "gauge", "KV blocks held by sequences", s.kv_blocks_used);
    page.one(
        "arc_kv_blocks_kept",
        "gauge",
        "KV blocks of ended sequences, kept until their room is needed",
        s.kv_blocks_kept,
    );
    page.one("arc_kv_blocks", "gauge", "KV blocks of the pool", s.kv_blocks_total);
    page.one("arc_prompt_tokens_total", "counter", "Prompt tokens run", s.prompt_tokens);
    let cached = "Prompt tokens that did not run, since a sequence before had left them";
    page.one("arc_cached_tokens_total", "counter", cached, s.cached_tokens);
    page.one("arc_output_tokens_total", "counter", "Tokens emitted", s.output_tokens);
    page.one(
        "arc_dropped_tokens_total",
        "counter",
        "Tokens that landed after their sequence had ended",
        s.dropped_tokens,
    );
    page.one("arc_drafts_total", "counter", "Draft tokens verified", s.drafted);
    page.one("arc_drafts_accepted_total", "counter", "Draft tokens emitted: tokens beyond one a step", s.accepted);
    page.one("arc_steps_total", "counter", "Steps", s.steps);
    page.one("arc_rows_total", "counter", "Rows run, padding included", s.rows);
    page.one("arc_padding_rows_total", "counter", "Padding rows run", s.padding_rows);
    page.one("arc_host_rows_total", "counter", "Rows drawn on the host", s.host_rows);
    page.family(
        "arc_sampler_declined_total",
        "counter",
        "Sequences that the device's sampler left to the host, by reason",
    );
    for (why, n) in Declined::ALL.into_iter().zip(s.declined) {
        page.line("arc_sampler_declined_total", &format!("{{reason=\"{}\"}}", why.word()), n);
    }
    page.one("arc_two_part_steps_total", "counter", "Steps whose draw waited for the host", s.two_part_steps);
    let waited = "Seconds that steps waited for masks of grammars";
    page.one("arc_mask_wait_seconds_total", "counter", waited, s.mask_wait_us / 1e6);
    page.one("arc_row_faults_total", "counter", "Sequences that ended with an error of their own", s.row_faults);
    let waited = "Most steps that were in flight when a request arrived";
    page.one("arc_arrival_steps_max", "gauge", waited, s.arrival_steps_max);
    device_lines(page, &s.counters);
    split_lines(page, &s.split.unwrap_or_default());
    page.one("arc_kv_bytes_total", "counter", "Bytes of KV cache that steps had to read", s.kv_bytes);
    page.histogram("arc_queue_seconds", "Submission to admission", &s.queue_time);
    page.histogram("arc_first_token_seconds", "Submission to first token", &s.first_token_time);
    page.histogram("arc_token_seconds", "Mean time of a token after the first, by sequence", &s.token_time);
    page.histogram("arc_request_seconds", "Submission to end", &s.request_time);
    page.histogram("arc_step_seconds", "Commit to commit", &s.step_time);
}

/// Whole, so that no counter is forgotten.
fn device_lines(page: &mut Page, counters: &Counters) {
    let Counters {
        launches,
        graphs,
        verified,
        graph_launches,
        graph_kernels,
        allocs,
        frees,
        syncs,
        h2d_copies,
        h2d_bytes,
        d2h_copies,
        d2h_bytes,
        weight_bytes,
    } = *counters;
    let mut count = |name, help, n| page.one(name, "counter", help, n);
    count("arc_launches_total", "Stages run, or kernels launched outside recorded steps", launches);
    count("arc_graphs_recorded_total", "Steps recorded: all before the first request", graphs);
    count("arc_steps_verified_total", "Recorded steps that ran eagerly as well and left the same", verified);
    count("arc_graph_launches_total", "Recorded steps replayed", graph_launches);
    count("arc_graph_kernels_total", "Kernels of the recorded steps that were replayed", graph_kernels);
    count("arc_allocations_total", "Device buffers allocated", allocs);
    count("arc_frees_total", "Device buffers freed", frees);
    count("arc_syncs_total", "Blocking waits for the device", syncs);
    page.family("arc_copies_total", "counter", "Copies between host and device");
    page.line("arc_copies_total", TO_DEVICE, h2d_copies);
    page.line("arc_copies_total", FROM_DEVICE, d2h_copies);
    page.family("arc_copied_bytes_total", "counter", "Bytes copied between host and device");
    page.line("arc_copied_bytes_total", TO_DEVICE, h2d_bytes);
    page.line("arc_copied_bytes_total", FROM_DEVICE, d2h_bytes);
    page.one("arc_weight_bytes_total", "counter", "Bytes of weights that steps had to read", weight_bytes);
}

const TO_DEVICE: &str = "{to=\"device\"}";
const FROM_DEVICE: &str = "{to=\"host\"}";

/// As `STEP_us` in the log; zeros before the first.
fn split_lines(page: &mut Page, split: &StepSplit) {
    let StepSplit { total_us, fwd_us, sample_us, other_us, rows } = *split;
    let name = "arc_step_mean_seconds";
    page.family(name, "gauge", "Mean time of the last 25 steps that were counted, and its parts");
    for (part, us) in [("total", total_us), ("fwd", fwd_us), ("sample", sample_us), ("other", other_us)] {
        page.line(name, &format!("{{part=\"{part}\"}}"), us / 1e6);
    }
    page.one("arc_step_mean_rows", "gauge", "Mean rows of these steps", rows);
}

#[derive(Default)]
struct Page(String);

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn line(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        let _ = writeln!(self.0, "{name}{labels} {value}");
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: impl std::fmt::Display) {
        self.family(name, kind, help);
        self.line(name, "", value);
    }

    fn histogram(&mut self, name: &str, help: &str, h: &Histogram) {
        self.family(name, "histogram", help);
        let mut below = 0;
        for (bound, n) in BOUNDS_US.iter().zip(&h.counts) {
            below += n;
            self.line(&format!("{name}_bucket"), &format!("{{le=\"{}\"}}", *bound as f64 / 1e6), below);
        }
        self.line(&format!("{name}_bucket"), "{le=\"+Inf\"}", h.count());
        self.line(&format!("{name}_sum"), "", h.sum_us / 1e6);
        self.line(&format!("{name}_count"), "", h.count());
    }
}

fn escape(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_series_has_a_type_and_buckets_add_up() {
        let metrics = Metrics::default();
        metrics.begin();
        metrics.answered("/health", 200);
        let mut engine = EngineStats::default();
        engine.queue_time.add(150.0);
        engine.queue_time.add(1e12);
        let page = metrics.render(&engine, "a\"b\\c");
        assert!(page.contains("model=\"a\\\"b\\\\c\""));
        assert!(page.contains("arc_http_requests_total{route=\"/health\",status=\"200\"} 1\n"));
        assert!(page.contains("arc_http_requests_in_flight 1\n"));
        assert!(page.contains("arc_queue_seconds_bucket{le=\"0.0001\"} 0\n"));
        assert!(page.contains("arc_queue_seconds_bucket{le=\"0.0002\"} 1\n"));
        assert!(page.contains(
            "arc_queue_seconds_bucket{le=\"+Inf\"} 2\narc_queue_seconds_sum 1000000.00015\narc_queue_seconds_count 2\n"
        ));
        let typed: Vec<&str> = page.lines().filter_map(|l| l.strip_prefix("# TYPE ")?.split(' ').next()).collect();
        for line in page.lines().filter(|l| !l.starts_with('#')) {
            let name = line.split(['{', ' ']).next().expect("lines are not empty");
            assert!(typed.iter().any(|t| name.starts_with(t)), "{name} has no type");
        }
    }
}
