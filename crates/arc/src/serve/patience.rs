//! A connection whose client has to take what it is sent.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep},
};

/// A stream that fails when nothing could be written to it for `patience`: a client that reads nothing would hold its place, and
/// what it asked for, as long as it likes.
pub(super) struct Patience<S> {
    stream: S,
    patience: Duration,
    /// Since the first write that had to wait.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<S> Patience<S> {
    pub(super) fn new(stream: S, patience: Duration) -> Patience<S> {
        Patience { stream, patience, waiting: None }
    }

    /// What the stream answered, or an error where it has answered nothing for too long.
    fn judge<T>(&mut self, answer: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if answer.is_ready() {
            self.waiting = None;
            return answer;
        }
        let patience = self.patience;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep(patience)));
        waiting
            .as_mut()
            .poll(context)
            .map(|()| Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes nothing")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patience<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patience<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let answer = Pin::new(&mut self.stream).poll_write(context, buf);
        self.judge(answer, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let answer = Pin::new(&mut self.stream).poll_write_vectored(context, bufs);
        self.judge(answer, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let answer = Pin::new(&mut self.stream).poll_flush(context);
        self.judge(answer, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let answer = Pin::new(&mut self.stream).poll_shutdown(context);
        self.judge(answer, context)
    }
}
