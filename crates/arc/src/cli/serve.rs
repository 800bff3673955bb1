//! `arc serve`.

use std::{
    process::ExitCode,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, bail};
use arc::{
    config::Config,
    open::{self, Sizes},
    serve::{
        App, HttpLimits,
        body::{PREPARING, Turns},
        ending::Ending,
        metrics::Metrics,
        models::ServedModel,
        serve,
    },
};
use arc_engine::engine::Shutdown;
use tokio::signal::unix::{SignalKind, signal};

use super::{ServerFlags, open_model};

/// What fits most users, where this one names nothing.
pub const SIZES: Sizes = Sizes { slots: 16, heads: None, random_rows: false };

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name or path of the model
    model: String,
    #[command(flatten)]
    pub flags: ServerFlags,
}

pub fn run(args: &Args, config: &Config) -> Result<ExitCode> {
    // The port first: a server that cannot listen need not load anything.
    let address = std::net::SocketAddr::new(config.host, u16::try_from(config.port).expect("the range ends at 65535"));
    let price = |name, text| ServedModel::price(name, text).map_err(anyhow::Error::msg);
    let prices = [price("price_prompt", &config.price_prompt)?, price("price_completion", &config.price_completion)?];
    let listener = std::net::TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
    listener.set_nonblocking(true).context("cannot listen")?;
    let model = open_model(&args.model, config)?;
    let running = open::start(&model, config, SIZES)?;
    let engine = running.engine.clone();
    let app = Arc::new(App {
        backend: Arc::new(running.engine),
        text: running.text,
        model: ServedModel {
            name: match config.served_name.as_str() {
                "auto" => ServedModel::name_of(&args.model),
                name => name.to_owned(),
            },
            title: model.title(),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            format: model.main_format(),
            parameters: model.parameters(),
            hugging_face_id: Some(config.hugging_face_id.clone()).filter(|id| id != "none"),
            prices,
        },
        http: HttpLimits {
            body_bytes: config.body_limit_kib as usize * 1024,
            connections: config.connections as usize,
            read_timeout_s: config.read_timeout_s,
            request_timeout_s: config.request_timeout_s,
            // All of them wait at first.
            max_choices: config.max_choices.min(config.queue) as usize,
            drain_s: config.drain_s,
        },
        metrics: Metrics::default(),
        ending: Ending::default(),
        turns: Turns::new(config.body_limit_kib as usize * 1024),
    });
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // Few: they only carry bytes, and every core is wanted by the model.
        .worker_threads(2)
        .max_blocking_threads(PREPARING)
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    let fault = runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener).context("cannot listen")?;
        eprintln!("{} is served on http://{}", app.model.name, listener.local_addr()?);
        let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let (stop, stopped) = tokio::sync::oneshot::channel();
        // By itself: a server that ends for another reason can be told to end at once, too.
        tokio::spawn(async move {
            let name = tokio::select! { _ = term.recv() => "SIGTERM", _ = int.recv() => "SIGINT" };
            eprintln!("{name}: running requests may end; the same again ends at once");
            let _ = stop.send(());
            tokio::select! { _ = term.recv() => {} , _ = int.recv() => {} }
            std::process::exit(super::INTERRUPTED.into());
        });
        let stop = async { stopped.await.expect("signals are waited for until one comes") };
        anyhow::Ok(serve(listener, app, stop).await)
    })?;
    // Before the runtime, whose threads may still hold streams that nobody will read to their end.
    runtime.shutdown_background();
    engine.shutdown(Shutdown::Stop);
    match fault {
        Some(fault) => bail!("the engine failed: {fault}"),
        None => Ok(ExitCode::SUCCESS),
    }
}
