//! What the server sees of the engine.

use arc_engine::{
    engine::{EngineHandle, RequestId, SubmitError},
    request::{EventSink, FinishReason, Request, RequestLimits},
    stats::EngineStats,
};

/// The engine behind the server. [`EngineHandle`] outside tests; tests script the answers that a healthy engine never
/// gives, such as a fault in the middle of a stream.
pub trait Backend: Send + Sync {
    /// Hands over a request; its events go to `sink`. Never blocks.
    fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<RequestId, SubmitError>;
    /// Ends a request at the next step border; one that has ended is left alone.
    fn end(&self, id: RequestId, reason: FinishReason);
    /// Counters and gauges.
    fn stats(&self) -> EngineStats;
    /// What requests are checked against.
    fn limits(&self) -> RequestLimits;
    /// What is wrong, where the device has failed or the engine has ended.
    fn fault(&self) -> Option<String>;
}

impl Backend for EngineHandle {
    fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<RequestId, SubmitError> {
        EngineHandle::submit(self, request, sink)
    }

    fn end(&self, id: RequestId, reason: FinishReason) {
        EngineHandle::end(self, id, reason);
    }

    fn stats(&self) -> EngineStats {
        EngineHandle::stats(self)
    }

    fn limits(&self) -> RequestLimits {
        EngineHandle::limits(self)
    }

    fn fault(&self) -> Option<String> {
        EngineHandle::fault(self).map(|fault| fault.to_string())
    }
}
