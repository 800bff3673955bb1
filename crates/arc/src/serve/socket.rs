//! The socket of a connection: its client has to take what it is sent, and to stay.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::TcpStream,
    time::{Sleep, sleep},
};

use super::App;

/// A stream that fails when nothing could be written to it for `limit`: a client that reads nothing would hold its place, and
/// what it asked for, as long as it likes.
pub(super) struct WriteTimeout {
    stream: Arc<TcpStream>,
    app: Arc<App>,
    limit: Duration,
    /// Since the first write that had to wait.
    waiting: Option<Blocked>,
}

/// What is counted as blocked, and for how long it may be.
struct Blocked {
    app: Arc<App>,
    over: Pin<Box<Sleep>>,
}

impl Drop for Blocked {
    fn drop(&mut self) {
        self.app.metrics.unblocked();
    }
}

impl WriteTimeout {
    pub(super) fn new(stream: Arc<TcpStream>, app: Arc<App>, limit: Duration) -> WriteTimeout {
        WriteTimeout { stream, app, limit, waiting: None }
    }

    /// What `write` gives once the stream takes something, or an error where it has taken nothing for too long.
    fn write(
        &mut self,
        context: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        while let Poll::Ready(is_ready) = self.stream.poll_write_ready(context) {
            is_ready?;
            match write(&self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                answer => {
                    self.waiting = None;
                    return Poll::Ready(answer);
                }
            }
        }
        let waiting = self.waiting.get_or_insert_with(|| {
            self.app.metrics.blocked();
            Blocked { app: self.app.clone(), over: Box::pin(sleep(self.limit)) }
        });
        ready!(waiting.over.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes nothing")))
    }
}

impl AsyncRead for WriteTimeout {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.stream.poll_read_ready(context))?;
            match self.stream.try_read(buf.initialize_unfilled()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                answer => return Poll::Ready(answer.map(|n| buf.advance(n))),
            }
        }
    }
}

impl AsyncWrite for WriteTimeout {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.write(context, |stream| stream.try_write(buf))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write(context, |stream| stream.try_write_vectored(bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// What was written is the system's.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// The stream is dropped next, which ends it.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Between two looks where bytes are there that nobody reads, and between a client's end and that of its connection.
const PAUSE: Duration = Duration::from_secs(1);

/// Waits until the client has closed its side, and a little for what is still to be read.
///
/// hyper sees this by reading, which it does not where it has bytes that belong to the next request: then what the client had asked
/// for would run to its end.
pub(super) async fn left(stream: &TcpStream) {
    while stream.ready(Interest::READABLE).await.is_ok_and(|ready| !ready.is_read_closed()) {
        sleep(PAUSE).await;
    }
    sleep(PAUSE).await;
}
