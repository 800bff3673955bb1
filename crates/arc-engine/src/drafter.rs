//! Who proposes tokens for the next step to verify. Drafts decide how many tokens a step lands, never which.

use arc_device::error::Result;
use arc_device::ops_v4::OpsV4;
use arc_device::step::{StepDelta, StepKey};

use crate::model::Model;

/// Makes drafts inside a step, between its draws and its commit, like a stage of the model.
pub trait Drafter<D: OpsV4> {
    /// Makes up to `key.drafts` drafts for every slot whose row asks for some ([`PROPOSE`]). Called for every step whose
    /// key has drafts, so that a drafter with a cache of its own sees every row.
    ///
    /// [`PROPOSE`]: arc_device::step::row_flags::PROPOSE
    fn draft(&mut self, model: &mut Model<D>, dev: &mut D, key: StepKey) -> Result<()>;

    /// Sees changes before the device does: for a drafter that must know whose slot it drafts for.
    fn staged(&mut self, _delta: &StepDelta) {}
}

/// The model's own draft block.
pub struct OwnBlock;

impl<D: OpsV4> Drafter<D> for OwnBlock {
    fn draft(&mut self, model: &mut Model<D>, dev: &mut D, key: StepKey) -> Result<()> {
        match model {
            Model::Decoder(_) => Ok(()),
            Model::DeepseekV4(model) => model.draft(dev, key),
        }
    }
}
