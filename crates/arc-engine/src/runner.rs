//! A model on its device, as the burst driver sees it.

use arc_device::count::Counters;
use arc_device::error::{DeviceError, Fault, Result};
use arc_device::ops::sample::SamplerConfig;
use arc_device::step::{Landed, MAX_DRAFTS, Part, Row, StepClocks, StepDelta, StepKey, row_flags};
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
}

impl<D: Steps> Runner<D> {
    /// Runs the step of every key over rows that are inert, so that a device that records has recorded them. Before
    /// anything else runs. Errors: the device's.
    pub fn warm_up(&mut self, keys: &[StepKey]) -> Result<()> {
        for &key in keys {
            let padding = Row { flags: row_flags::PADDING, ..Row::default() };
            self.stage(&StepDelta { rows: Some(vec![padding; key.rows as usize]), ..StepDelta::default() })?;
            let step = self.enqueue(key)?;
            while key.part != Part::Forward && self.head() < step {
                if self.poll()? == StreamState::Idle && self.head() < step {
                    return Err(DeviceError::Fault(Fault::LostStep { enqueued: step, landed: self.head() }));
                }
            }
            self.read_to(self.head());
        }
        Ok(())
    }
}

impl<D: Steps> DeviceLoop for Runner<D> {
    fn enqueue(&mut self, key: StepKey) -> Result<u64> {
        let Runner { dev, model, drafter } = self;
        let drafter: &mut dyn Drafter<D> = match drafter {
            Some(drafter) => &mut **drafter,
            None => &mut OwnBlock,
        };
        dev.step(key, &mut |dev| model.step_with(drafter, dev, key))
    }

    fn max_drafts(&self) -> u32 {
        if self.drafter.is_some() { MAX_DRAFTS as u32 } else { 0 }
    }
}

impl<D: Steps> Landing for Runner<D> {
    fn stage(&mut self, delta: &StepDelta) -> Result<()> {
        if let Some(drafter) = &mut self.drafter {
            drafter.staged(delta);
        }
        self.dev.stage(delta)
    }

    fn can_finish(&self, sampling: &SamplerConfig) -> bool {
        self.dev.can_finish(sampling)
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
