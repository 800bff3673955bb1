//! `verify_replay`: a step runs twice from the same memory, first eagerly and then replayed, and has to leave the same.
//!
//! All memory that steps write is copied before the step, and given back between the two. What outlives a step is compared, bit
//! for bit by a sum of it: slots, KV cache, rings; and so are its logits and what it landed. The rest is scratch of a step's own.

use std::sync::Arc;

use super::driver::{Driver, Grid};
use super::{Cuda, alloc_zeroed, args, kernel};
use crate::error::{DeviceError, Result};
use crate::step::{Landed, Part, StepKey};
use crate::{Landing, MemoryClass};

/// Memory that steps write.
#[derive(Debug, Clone)]
pub(super) struct Region {
    pub name: String,
    pub class: MemoryClass,
    pub at: u64,
    pub bytes: usize,
    /// Bytes that are the same whenever the step runs: all but its clocks.
    pub timeless: usize,
}

/// A copy of all of it.
pub(super) struct Saved {
    driver: Arc<Driver>,
    regions: Vec<Region>,
    /// Where the copy of each begins, from `at`.
    places: Vec<u64>,
    at: u64,
    /// A sum of each.
    sums: u64,
}

impl Saved {
    /// Room for a copy. Errors: `OutOfMemory`.
    fn new(driver: &Arc<Driver>, regions: Vec<Region>) -> Result<Saved> {
        let mut total = 0;
        let places = regions.iter().map(|region| {
            let place = total;
            total += region.bytes.next_multiple_of(256) as u64;
            place
        });
        let places = places.collect();
        let at = alloc_zeroed(driver, "a copy of all that steps write (verify_replay)", total as usize)?;
        let sums = alloc_zeroed(driver, "sums of it", 8 * regions.len());
        let sums = sums.inspect_err(|_| {
            // SAFETY: just allocated, and nobody has it.
            unsafe { driver.free(at) }
        })?;
        Ok(Saved { driver: driver.clone(), regions, places, at, sums })
    }

    fn save(&self) -> Result<()> {
        let mut places = self.regions.iter().zip(&self.places);
        places.try_for_each(|(region, place)| {
            self.driver.copy_within(self.at + place, region.at, region.bytes, "verify_replay")
        })
    }

    fn give_back(&self) -> Result<()> {
        let mut places = self.regions.iter().zip(&self.places);
        places.try_for_each(|(region, place)| {
            self.driver.copy_within(region.at, self.at + place, region.bytes, "verify_replay")
        })
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed once; `self.driver` keeps the context. The calls wait for what is in flight.
        unsafe {
            self.driver.free(self.at);
            self.driver.free(self.sums);
        }
    }
}

/// What a step left: sums of memory, and what landed.
struct Left {
    sums: Vec<u64>,
    landed: Vec<Landed>,
}

impl Cuda {
    /// Whether every step is run twice from now on.
    pub fn set_verify(&mut self, on: bool) {
        self.options.verify = on;
    }

    /// Runs a recorded step twice: eagerly, and then replayed. Errors: `Replay` where they leave different things.
    pub(super) fn step_twice(&mut self, key: StepKey, body: &mut dyn FnMut(&mut Self) -> Result<()>) -> Result<()> {
        let saved = match self.saved.take() {
            Some(saved) => saved,
            None => {
                let mut regions = self.regions.clone();
                regions.extend(self.state().regions());
                Saved::new(&self.driver, regions)?
            }
        };
        let same = self.twice(&saved, key, body);
        self.saved = Some(saved);
        same
    }

    fn twice(&mut self, saved: &Saved, key: StepKey, body: &mut dyn FnMut(&mut Self) -> Result<()>) -> Result<()> {
        saved.save()?;
        self.enqueue(key, body)?;
        let eager = self.left(saved, key)?;
        saved.give_back()?;
        self.replay(key)?;
        let replayed = self.left(saved, key)?;
        let part = |what: String, eager: String, replayed: String| DeviceError::Replay {
            key: key.to_string(),
            eager: format!("{what} {eager}"),
            replayed: format!("{what} {replayed}"),
        };
        for (h, (eager, replayed)) in eager.landed.iter().zip(&replayed.landed).enumerate() {
            let (eager, replayed) = (eager.told(), replayed.told());
            if eager != replayed {
                return Err(part(format!("of head row {h}"), eager, replayed));
            }
        }
        let logits = self.matmul.logits;
        for (i, region) in saved.regions.iter().enumerate() {
            let outlives = region.class == MemoryClass::State || Some(region.at) == logits;
            if outlives && eager.sums[i] != replayed.sums[i] {
                let told = |sum: u64| format!("with the sum {sum:016x}");
                return Err(part(region.name.clone(), told(eager.sums[i]), told(replayed.sums[i])));
            }
        }
        self.counters.verified += 1;
        Ok(())
    }

    /// Waits for the step and sums up what it left.
    fn left(&mut self, saved: &Saved, key: StepKey) -> Result<Left> {
        let mut sums = vec![0; saved.regions.len()];
        self.driver.zero(saved.sums, 8 * sums.len())?;
        for (region, sum) in saved.regions.iter().zip((saved.sums..).step_by(8)) {
            let grid = Grid::new((region.timeless / 4096).clamp(1, 1024) as u32, 256);
            self.launch_with(kernel!("step_sum"), grid, args![region.at, region.timeless as u64, sum], false)?;
        }
        self.driver.copy_out(sums.as_mut_ptr().cast(), saved.sums, 8 * sums.len(), "verify_replay")?;
        self.counters.d2h_copies += 1;
        self.counters.d2h_bytes += 8 * sums.len() as u64;
        self.counters.syncs += 1;
        self.driver.synchronize("verify_replay")?;
        let heads = if key.part == Part::Forward { 0 } else { self.state().table.1 };
        let step = self.state().enqueued + 1;
        Ok(Left { sums, landed: (0..heads).map(|h| self.landed(step, h)).collect() })
    }
}
