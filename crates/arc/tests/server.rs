//! The real binary serving a real model on a loopback port.

mod common;

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::Command,
    time::{Duration, Instant},
};

use common::{SMOLLM2, Server, model, python};

/// A request that runs until somebody stops it.
const ENDLESS: &str = r#"{"prompt": "1 2 3", "max_tokens": 4000, "ignore_eos": true, "stream": true}"#;

#[test]
fn the_openai_client_is_content() {
    let server = Server::start(&model(SMOLLM2), &["--context", "4096", "--served-name", "smollm2"]);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/python/openai_client.py");
    let output = Command::new(python()).arg(script).arg(format!("http://{}", server.address)).output();
    let output = output.expect("python is installed");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}\n(install the openai package, or name a Python in ARC_TEST_PYTHON)");
    let n: u32 = out.trim().strip_suffix(" checks passed").and_then(|n| n.parse().ok()).expect("a count");
    assert!(n >= 90, "only {n} checks ran");
    assert!(server.metric("arc_two_part_steps_total") > 50.0, "structured answers draw under masks");
    assert!(server.metric("arc_mask_wait_seconds_total") > 0.0);
    assert_eq!(server.metric("arc_requests_running"), 0.0);
}

#[test]
fn a_client_that_leaves_frees_its_slot() {
    let server = Server::start(&model(SMOLLM2), &["--slots", "1", "--context", "4096"]);
    let mut lines = BufReader::new(server.send("POST", "/v1/completions", ENDLESS)).lines();
    assert!(lines.any(|l| l.expect("the stream lives").starts_with("data: ")), "tokens arrive");
    server.wait_for("arc_requests_running", |n| n == 1.0);
    drop(lines);
    server.wait_for("arc_requests_running", |n| n == 0.0);

    // The same before the first token, where nothing is written that could fail: the request is not streamed.
    // And with more behind it, which nobody reads before there is an answer.
    for behind in ["", "GET /health HTTP/1.1"] {
        let whole = ENDLESS.replace("\"stream\": true", "\"stream\": false");
        let mut stream = server.send("POST", "/v1/completions", &whole);
        stream.write_all(behind.as_bytes()).expect("the server listens");
        server.wait_for("arc_requests_running", |n| n == 1.0);
        drop(stream);
        server.wait_for("arc_requests_running", |n| n == 0.0);
        server.wait_for("arc_http_requests_in_flight", |n| n == 1.0);
    }
    let (_, page) = server.request("GET", "/metrics", "");
    assert!(page.contains("arc_requests_finished_total{reason=\"cancelled\"} 3\n"), "{page}");
}

#[test]
fn metrics_tell_how_requests_ended_and_what_steps_cost() {
    let server = Server::start(&model(SMOLLM2), &["--slots", "1"]);
    let ended = |reason: &str| server.metric(&format!("arc_requests_finished_total{{reason=\"{reason}\"}}"));
    let body = r#"{"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "stop": ["e"]}"#;
    let (status, answer) = server.request("POST", "/v1/completions", body);
    assert!(status == 200 && answer.contains("\"finish_reason\":\"stop\""), "{answer}");
    server.wait_for("arc_requests_running", |n| n == 0.0);
    assert_eq!((ended("stop"), ended("length"), ended("cancelled")), (1.0, 0.0, 0.0));
    assert_eq!(server.metric("arc_step_mean_seconds{part=\"total\"}"), 0.0, "too few steps for a mean");
    let body = r#"{"prompt": "Once upon a time", "max_tokens": 28, "temperature": 0}"#;
    assert_eq!(server.request("POST", "/v1/completions", body).0, 200);
    server.wait_for("arc_requests_running", |n| n == 0.0);
    assert_eq!((ended("stop"), ended("length"), ended("cancelled")), (1.0, 1.0, 0.0));
    let part = |part: &str| server.metric(&format!("arc_step_mean_seconds{{part=\"{part}\"}}"));
    let (total, parts) = (part("total"), part("fwd") + part("sample") + part("other"));
    assert!(part("fwd") > 0.0 && (total - parts).abs() < 1e-9, "{total} of {parts}");
    assert!(server.metric("arc_launches_total") > 0.0);
    assert_eq!(server.metric("arc_copies_total{to=\"host\"}"), 0.0);
}

#[test]
fn a_full_server_says_when_to_come_back() {
    let server = Server::start(&model(SMOLLM2), &["--slots", "1", "--queue", "1", "--context", "4096"]);
    // What can never be taken is no matter of time.
    let (status, answer) = server.request("POST", "/v1/completions", r#"{"prompt": "a", "n": 2}"#);
    assert!(status == 400 && answer.contains("from 1 to 1"), "{answer}");
    let running = server.send("POST", "/v1/completions", ENDLESS);
    server.wait_for("arc_requests_running", |n| n == 1.0);
    let waiting = server.send("POST", "/v1/completions", ENDLESS);
    server.wait_for("arc_requests_waiting", |n| n == 1.0);
    let mut answer = String::new();
    let mut refused = server.send("POST", "/v1/completions", ENDLESS);
    refused.read_to_string(&mut answer).expect("the server answers");
    assert!(answer.starts_with("HTTP/1.1 429 "), "{answer}");
    assert!(answer.to_lowercase().contains("retry-after: "), "{answer}");
    assert!(answer.contains("rate_limit_error"), "{answer}");
    drop((running, waiting));
    server.wait_for("arc_requests_running", |n| n == 0.0);
    assert_eq!(server.request("POST", "/v1/completions", r#"{"prompt": "a", "max_tokens": 1}"#).0, 200);
}

#[test]
fn the_end_is_awaited_and_then_enforced() {
    // Enough time: the running request ends by itself, nothing new is taken, and what has come by half is not waited for.
    let mut server =
        Server::start(&model(SMOLLM2), &["--context", "4096", "--drain-s", "60", "--read-timeout-s", "60"]);
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n";
    let half = [head, &format!("{head}Content-Length: 100\r\n\r\n{{")].map(|sent| {
        let mut stream = TcpStream::connect(&server.address).expect("the server listens");
        stream.write_all(sent.as_bytes()).expect("the server reads");
        stream
    });
    let body = r#"{"prompt": "1 2 3", "max_tokens": 48, "ignore_eos": true, "stream": true}"#;
    let mut lines = BufReader::new(server.send("POST", "/v1/completions", body)).lines();
    assert!(lines.any(|l| l.expect("the stream lives").starts_with("data: ")), "tokens arrive");
    let start = Instant::now();
    server.signal("TERM");
    let rest: Vec<String> = lines.map(|l| l.expect("the stream is not cut")).collect();
    assert!(rest.iter().any(|l| l == "data: [DONE]"), "{rest:?}");
    assert!(server.child.wait().expect("it was started").success());
    assert!(start.elapsed() < Duration::from_secs(30));
    for (mut stream, want) in half.into_iter().zip(["", "HTTP/1.1 503 "]) {
        let mut answer = String::new();
        // What it was about to send may be thrown back at it.
        let _ = stream.read_to_string(&mut answer);
        assert!(answer.starts_with(want), "{answer}");
    }

    // No time: a running request is told, streamed or not.
    let mut server = Server::start(&model(SMOLLM2), &["--context", "4096", "--drain-s", "0"]);
    let mut stream = BufReader::new(server.send("POST", "/v1/completions", ENDLESS)).lines();
    assert!(stream.any(|l| l.expect("the stream lives").starts_with("data: ")), "tokens arrive");
    let mut whole = server.send("POST", "/v1/completions", &ENDLESS.replace("\"stream\": true", "\"stream\": false"));
    server.wait_for("arc_requests_running", |n| n == 2.0);
    let start = Instant::now();
    server.signal("INT");
    assert!(server.child.wait().expect("it was started").success());
    assert!(start.elapsed() < Duration::from_secs(10));
    let rest = stream.map(|l| l.expect("the stream is not cut"));
    let last = rest.filter(|l| l.starts_with("data: ")).last().expect("more came");
    assert!(last.contains("shutting down"), "{last}");
    let mut answer = String::new();
    whole.read_to_string(&mut answer).expect("the server answers");
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("shutting down"), "{answer}");
}

#[test]
fn time_limits_end_requests() {
    let server =
        Server::start(&model(SMOLLM2), &["--request-timeout-s", "1", "--read-timeout-s", "1", "--context", "4096"]);
    let (status, body) = server.request("POST", "/v1/completions", ENDLESS);
    assert_eq!(status, 200, "a stream has begun before its time is up");
    assert!(body.contains("\"code\":\"timeout\"") && body.contains("took longer than 1 s"), "{body}");
    assert!(!body.contains("[DONE]"));
    let whole = ENDLESS.replace("\"stream\": true", "\"stream\": false");
    assert_eq!(server.request("POST", "/v1/completions", &whole).0, 504);
    server.wait_for("arc_requests_running", |n| n == 0.0);
    // A body that never comes, and a head that never ends.
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 100\r\n\r\n{";
    for (sent, want) in [(head, "HTTP/1.1 408 "), ("POST /v1/completions HTTP/1.1\r\nHost: x\r\n", "")] {
        let mut stream = TcpStream::connect(&server.address).expect("the server listens");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout above zero");
        stream.write_all(sent.as_bytes()).expect("the server reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("the server answers or hangs up");
        assert!(answer.starts_with(want), "{answer}");
    }
}

/// Who asks for page after page and reads none of it.
#[test]
fn a_client_that_takes_nothing_loses_its_place() {
    let server = Server::start(&model(SMOLLM2), &["--connections", "1", "--read-timeout-s", "1"]);
    let mut deaf = TcpStream::connect(&server.address).expect("the server listens");
    deaf.set_write_timeout(Some(Duration::from_millis(200))).expect("a timeout above zero");
    let ask = format!("GET /metrics HTTP/1.1\r\nHost: {}\r\n\r\n", server.address).repeat(500);
    // Until the server, which cannot write, reads no more.
    let began = Instant::now();
    while deaf.write_all(ask.as_bytes()).is_ok() {
        assert!(began.elapsed() < Duration::from_secs(60), "it takes requests for ever");
    }
    assert_eq!(server.request("GET", "/health", "").0, 200, "the one place is free again");
}
