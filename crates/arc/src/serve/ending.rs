//! How a server ends.

use tokio::sync::watch;

use super::error::ApiError;

/// How far it is. Later ones are larger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// It takes requests.
    Serving,
    /// It takes no new ones; those that run may end.
    Draining,
    /// What still runs says that it is not waited for.
    Over,
}

/// The stage, for whoever asks or waits.
#[derive(Debug)]
pub struct Ending(watch::Sender<Stage>);

impl Default for Ending {
    fn default() -> Ending {
        Ending(watch::Sender::new(Stage::Serving))
    }
}

impl Ending {
    /// Goes on to a later stage.
    pub fn reach(&self, stage: Stage) {
        self.0.send_if_modified(|now| std::mem::replace(now, stage.max(*now)) < stage);
    }

    /// Whether the stage is reached.
    pub fn is(&self, stage: Stage) -> bool {
        *self.0.borrow() >= stage
    }

    /// Waits until the stage is reached.
    pub async fn reached(&self, stage: Stage) {
        let mut seen = self.0.subscribe();
        let found = seen.wait_for(|&now| now >= stage).await;
        found.expect("the sender lives as long as `self`");
    }

    /// What comes of `work`. Errors: the stage is reached before it is done.
    pub async fn before<T>(&self, stage: Stage, work: impl Future<Output = T>) -> Result<T, ApiError> {
        tokio::select! {
            biased;
            () = self.reached(stage) => Err(ApiError::shutting_down()),
            done = work => Ok(done),
        }
    }
}
