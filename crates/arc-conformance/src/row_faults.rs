//! Faults of one row among 256: its request ends with an error, and nobody else's tokens change. And a fault of the whole
//! device while a server serves.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use arc_device::count::Counters;
use arc_device::cuda::{Cuda, CudaOptions};
use arc_device::error::{Fault, Result as DeviceResult};
use arc_device::ops::sample::{Declined, SamplerConfig};
use arc_device::step::{Landed, StepClocks, StepDelta, StepKey, TOKEN_OF_SLOT, row_flags};
use arc_device::{DeviceLoop, Landing, StreamState};
use arc_engine::engine::{self, EngineConfig, Health};
use arc_engine::load::{LoadError, ModelFile};
use arc_engine::model::{Model, ModelConfig};
use arc_engine::request::{Event, FinishReason, Request};
use arc_engine::runner::Runner;
use arc_engine::scheduler::buckets::Buckets;

use crate::inputs::Rng;
use crate::models::{Rig, limits, prompt};
use crate::suite::{Suite, Verdict};

/// Embeddings, where the head is a matrix of its own.
const EMBED: &str = "embed.weight";
/// A token whose embedding is made NaN.
const POISON: u32 = 290;
/// Requests, by their seeds.
const REQUESTS: u64 = 256;
const MEETS_NAN: u64 = 100;
const BAD_TOKEN: u64 = 30;
const BAD_POSITION: u64 = 200;

/// Whether a model's embeddings can be spoiled without its head.
pub fn can_be_poisoned(file: &ModelFile) -> bool {
    file.weights().is_some_and(|weights| {
        weights.tensor(EMBED).is_ok_and(|tensor| tensor.n_bytes() == 2 * tensor.rows() * tensor.cols())
    })
}

/// A device whose row table goes wrong for two requests.
struct Meddler {
    runner: Runner<Cuda>,
    vocab: u32,
    seeds: HashMap<u16, u64>,
    meddles: Arc<AtomicBool>,
}

impl Landing for Meddler {
    fn stage(&mut self, delta: &StepDelta) -> DeviceResult<()> {
        self.seeds.extend(delta.admit.iter().map(|init| (init.slot, init.sampling.seed)));
        if !self.meddles.load(Ordering::Relaxed) {
            return self.runner.stage(delta);
        }
        let mut delta = delta.clone();
        for row in delta.rows.iter_mut().flatten().filter(|row| row.flags & row_flags::PADDING == 0) {
            match self.seeds.get(&row.slot) {
                Some(&BAD_TOKEN) if row.token != TOKEN_OF_SLOT => row.token = self.vocab,
                // Decoding, so that its prompt is in order.
                Some(&BAD_POSITION) if row.token == TOKEN_OF_SLOT => row.offset = 1 << 30,
                _ => {}
            }
        }
        self.runner.stage(&delta)
    }

    fn declines(&self, sampling: &SamplerConfig) -> Option<Declined> {
        self.runner.declines(sampling)
    }

    fn fetch_rows(&mut self, heads: &[u32]) -> DeviceResult<()> {
        self.runner.fetch_rows(heads)
    }

    fn fetched(&self, idx: usize) -> Option<&[f32]> {
        self.runner.fetched(idx)
    }

    fn poll(&mut self) -> DeviceResult<StreamState> {
        self.runner.poll()
    }

    fn head(&self) -> u64 {
        self.runner.head()
    }

    fn landed(&self, step: u64, head_idx: usize) -> Landed {
        self.runner.landed(step, head_idx)
    }

    fn read_to(&mut self, step: u64) {
        self.runner.read_to(step);
    }

    fn clocks(&self, step: u64) -> StepClocks {
        self.runner.clocks(step)
    }

    fn fault(&self) -> Option<Fault> {
        self.runner.fault()
    }

    fn counters(&self) -> Counters {
        self.runner.counters()
    }
}

impl DeviceLoop for Meddler {
    fn enqueue(&mut self, key: StepKey) -> DeviceResult<u64> {
        self.runner.enqueue(key)
    }
}

/// How a request ended: its tokens, and what was wrong.
type Ended = (Vec<u32>, Option<String>);

/// All requests at once; `nan`: one of them meets the token.
fn ask(rig: &Rig, nan: bool) -> Result<Vec<Ended>, String> {
    let mut rng = Rng(41);
    let mut answers = Vec::new();
    for seed in 0..REQUESTS {
        let len = 2 + rng.below(20);
        let mut prompt = prompt(&mut rng, len, 250);
        if nan && seed == MEETS_NAN {
            prompt[1] = POISON;
        }
        let sampling = SamplerConfig {
            temperature: [0.0, 1.0][seed as usize % 2],
            seed,
            // Nobody draws it by chance.
            bias: vec![(POISON, -100.0)],
            ..SamplerConfig::default()
        };
        let request = Request { max_tokens: Some(16), ignore_stop: true, ..Request::new(prompt, sampling) };
        let (sink, events) = channel();
        rig.engine.submit(request, Box::new(sink)).map_err(|error| error.to_string())?;
        answers.push(events);
    }
    let end = |events: Receiver<Event>| {
        let mut tokens = Vec::new();
        loop {
            match events.recv_timeout(Duration::from_secs(60)).map_err(|error| format!("no event: {error}"))? {
                Event::Prompt(_) | Event::Cached(_) => {}
                Event::Token(token) => tokens.push(token.id),
                Event::Finished(end) if end.reason == FinishReason::Length => return Ok((tokens, None)),
                Event::Finished(end) => {
                    return Ok((tokens, Some(end.error.clone().unwrap_or_else(|| format!("{end:?}")))));
                }
            }
        }
    };
    answers.into_iter().map(end).collect()
}

/// A folder of the test's own, gone at its end.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A NaN, a token out of range and a position out of range, each in one row of 256.
pub fn rows(suite: &Suite, path: &Path) -> Verdict {
    let text = |error: LoadError| error.to_string();
    let folder = Folder(std::env::temp_dir().join(format!("arc-conformance-{}", std::process::id())));
    std::fs::create_dir_all(&folder.0).map_err(|error| error.to_string())?;
    let file = ModelFile::open(path).map_err(text)?;
    let weights = file.weights().ok_or("not a file of weights")?;
    let mut bytes = std::fs::read(weights.path()).map_err(|error| error.to_string())?;
    let cols = weights.tensor(EMBED).map_err(text)?.cols();
    let row = weights.find(EMBED).ok_or("no embeddings")?.range.start + POISON as usize * cols * 2;
    bytes[row..row + 2 * cols].fill(0xff);
    let name = weights.path().file_name().expect("a file has a name");
    std::fs::write(folder.0.join(name), bytes).map_err(|error| error.to_string())?;
    std::fs::copy(path.join("config.json"), folder.0.join("config.json")).map_err(|error| error.to_string())?;

    let limits = limits(REQUESTS as usize, 512);
    let file = ModelFile::open(&folder.0).map_err(text)?;
    let config = ModelConfig::read(&file).map_err(text)?;
    let vocab = config.shape().vocab as u32;
    let buckets = Buckets::recorded(limits.rows as u32);
    let keys = buckets.keys(&limits, &[]);
    let options = CudaOptions { ordinal: suite.ordinal(), late: false, ..CudaOptions::default() };
    let meddle = Arc::new(AtomicBool::new(false));
    let engine = engine::spawn(EngineConfig { buckets, ..EngineConfig::default() }, limits, vocab, {
        let meddles = meddle.clone();
        move || {
            let mut dev = Cuda::new(options, limits)?;
            let model = Model::load(&mut dev, &file, &config, &limits)?;
            let mut runner = Runner::new(dev, model);
            runner.warm_up(&keys)?;
            Ok::<_, LoadError>(Meddler { runner, vocab, seeds: HashMap::new(), meddles })
        }
    });
    let rig = Rig { engine: engine.map_err(|error| error.to_string())?, vocab };
    let want = ask(&rig, false)?;
    if let Some((_, Some(error))) = want.iter().find(|(_, error)| error.is_some()) {
        return Err(format!("without a fault: {error}"));
    }
    meddle.store(true, Ordering::Relaxed);
    let got = ask(&rig, true)?;
    meddle.store(false, Ordering::Relaxed);
    let mut said = Vec::new();
    for (seed, (want, (tokens, error))) in (0..).zip(want.iter().zip(&got)) {
        let (part, landed) = match seed {
            MEETS_NAN => ("not finite", 0),
            BAD_TOKEN => ("out of range", 0),
            BAD_POSITION => ("out of range", 1),
            _ if (tokens, error) == (&want.0, &want.1) => continue,
            _ => return Err(format!("request {seed}: {want:?} wanted, {tokens:?} {error:?}")),
        };
        match error {
            Some(error) if error.contains(part) && tokens[..] == want.0[..landed] => said.push(error.clone()),
            _ => return Err(format!("request {seed}: an error that says `{part}` wanted, {tokens:?} {error:?}")),
        }
    }
    if ask(&rig, false)? != want {
        return Err("afterwards, tokens are others".to_owned());
    }
    let (faults, health) = (rig.engine.stats().row_faults, rig.engine.health());
    if faults != 3 || health != Health::Ready {
        return Err(format!("{faults} row faults, {health:?}"));
    }
    Ok(format!("253 of 256 unchanged; {said:?}"))
}

/// A kernel that traps under `arc serve`: who is being answered hears of it, health fails, and the process ends.
pub fn server(suite: &Suite, path: &Path) -> Verdict {
    let text = |error: std::io::Error| error.to_string();
    let program = std::env::current_exe().map_err(text)?.with_file_name("arc");
    let mut command = Command::new(&program);
    command.arg("serve").arg(path).args(["--device", "cuda", "--port", "0", "--slots", "2", "--max-rows", "32"]);
    command.args(["--context", "8192", "--gpu", &suite.ordinal().to_string()]).env("ARC_CUDA_TRAP_SEED", TRAP);
    let child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut child = Process(child.map_err(|error| format!("{}: {error}", program.display()))?);
    let mut lines = BufReader::new(child.0.stderr.take().expect("piped")).lines();
    let address = loop {
        let line = lines.next().ok_or("the server ended before it listened")?.map_err(text)?;
        if let Some((_, address)) = line.split_once(" is served on http://") {
            break address.to_owned();
        }
    };
    let said = std::thread::spawn(move || lines.map_while(Result::ok).collect::<Vec<_>>().join(" | "));
    let send = |method: &str, path: &str, body: &str| -> std::io::Result<TcpStream> {
        let mut stream = TcpStream::connect(&address)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        write!(stream, "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n")?;
        write!(stream, "Content-Length: {}\r\n\r\n{body}", body.len())?;
        Ok(stream)
    };
    let body = |seed: &str| {
        format!(r#"{{"prompt": "1 2 3", "max_tokens": 8000, "ignore_eos": true, "stream": true, "seed": {seed}}}"#)
    };
    let mut running = BufReader::new(send("POST", "/v1/completions", &body("1")).map_err(text)?).lines();
    if !running.by_ref().any(|line| line.is_ok_and(|line| line.starts_with("data: "))) {
        return Err("no tokens came".to_owned());
    }
    let _traps = send("POST", "/v1/completions", &body(TRAP)).map_err(text)?;
    let began = Instant::now();
    let rest = std::thread::spawn(move || running.map_while(Result::ok).filter(|line| line.contains("error")).last());
    let mut unhealthy = None;
    let code = loop {
        if unhealthy.is_none() {
            let mut answer = String::new();
            let asked = send("GET", "/health", "").and_then(|mut stream| stream.read_to_string(&mut answer));
            unhealthy = (asked.is_ok() && answer.starts_with("HTTP/1.1 503")).then(|| began.elapsed());
        }
        if let Some(status) = child.0.try_wait().map_err(text)? {
            break status.code();
        }
        if began.elapsed() > Duration::from_secs(5) {
            return Err("the process goes on after five seconds".to_owned());
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let ended = began.elapsed();
    let heard = rest.join().expect("it only reads");
    let said = said.join().expect("it only reads");
    match (code, unhealthy, heard) {
        (Some(1), Some(unhealthy), Some(heard)) if ended < SOON => Ok(format!(
            "health failed after {unhealthy:.0?}, the process ended after {ended:.0?}: {said}; the client heard {heard}"
        )),
        (_, _, heard) => Err(format!(
            "exit code {code:?} after {ended:.0?}, health {unhealthy:?}, the client heard {heard:?}: {said}"
        )),
    }
}

/// The seed of the request that traps.
const TRAP: &str = "77001";
/// How long a process may live after its device failed.
const SOON: Duration = Duration::from_millis(1500);

/// A process that does not outlive the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
