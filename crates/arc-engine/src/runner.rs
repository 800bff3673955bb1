//! A model on its device, as the burst driver sees it.

mod verify;

use arc_device::count::Counters;
use arc_device::error::{Fault, Result};
use arc_device::ops::sample::{Declined, SamplerConfig};
use arc_device::step::{Landed, MAX_DRAFTS, StepClocks, StepDelta, StepKey};
use arc_device::{DeviceLoop, Landing, Steps, StreamState};

use crate::drafter::{Drafter, OwnBlock};
use crate::model::Model;

/// Runs a model's steps on a device.
pub struct Runner<D: Steps> {
    dev: D,
    model: Model<D>,
    drafter: Option<Box<dyn Drafter<D>>>,
}

impl<D: Steps> Runner<D> {
    /// A loaded model with the device that it was loaded on. It drafts where it was loaded with a draft block.
    pub fn new(dev: D, model: Model<D>) -> Self {
        let drafter = model.can_draft().then(|| Box::new(OwnBlock) as Box<dyn Drafter<D>>);
        Runner { dev, model, drafter }
    }

    /// The same with somebody else's drafts.
    pub fn with_drafter(dev: D, model: Model<D>, drafter: Box<dyn Drafter<D>>) -> Self {
        Runner { dev, model, drafter: Some(drafter) }
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.dev
    }
}

impl<D: Steps> Runner<D> {
    /// Records the step of every key, on a device that records. Before anything runs. Errors: the device's.
    pub fn warm_up(&mut self, keys: &[StepKey]) -> Result<()> {
        keys.iter().try_for_each(|&key| self.with_body(|dev, body| dev.record(key, &mut |dev| body(dev, key))))
    }

    /// The device, and what it runs of a step.
    fn with_body<T>(&mut self, then: impl FnOnce(&mut D, Body<'_, D>) -> T) -> T {
        let Runner { dev, model, drafter } = self;
        let drafter: &mut dyn Drafter<D> = match drafter {
            Some(drafter) => &mut **drafter,
            None => &mut OwnBlock,
        };
        then(dev, &mut |dev, key| model.step_with(drafter, dev, key))
    }
}

/// What a device runs of a step.
type Body<'a, D> = &'a mut dyn FnMut(&mut D, StepKey) -> Result<()>;

impl<D: Steps> DeviceLoop for Runner<D> {
    fn enqueue(&mut self, key: StepKey) -> Result<u64> {
        self.with_body(|dev, body| dev.step(key, &mut |dev| body(dev, key)))
    }

    fn max_drafts(&self) -> u32 {
        if self.drafter.is_some() { MAX_DRAFTS as u32 } else { 0 }
    }

    fn rewinds(&self) -> bool {
        self.model.rewinds()
    }
}

impl<D: Steps> Landing for Runner<D> {
    fn stage(&mut self, delta: &StepDelta) -> Result<()> {
        if let Some(drafter) = &mut self.drafter {
            drafter.staged(delta);
        }
        self.dev.stage(delta)
    }

    fn declines(&self, sampling: &SamplerConfig) -> Option<Declined> {
        self.dev.declines(sampling)
    }

    fn fetch_rows(&mut self, heads: &[u32]) -> Result<()> {
        self.dev.fetch_rows(heads)
    }

    fn fetched(&self, idx: usize) -> Option<&[f32]> {
        self.dev.fetched(idx)
    }

    fn poll(&mut self) -> Result<StreamState> {
        self.dev.poll()
    }

    fn head(&self) -> u64 {
        self.dev.head()
    }

    fn landed(&self, step: u64, head_idx: usize) -> Landed {
        self.dev.landed(step, head_idx)
    }

    fn read_to(&mut self, step: u64) {
        self.dev.read_to(step);
    }

    fn clocks(&self, step: u64) -> StepClocks {
        self.dev.clocks(step)
    }

    fn fault(&self) -> Option<Fault> {
        self.dev.fault()
    }

    fn counters(&self) -> Counters {
        self.dev.counters()
    }
}
