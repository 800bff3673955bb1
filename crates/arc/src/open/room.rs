//! Whether a model fits: told before anything of it is read.

use std::fmt;

use arc_device::{MemoryClass, cpu};
use arc_engine::model::Plan;

use super::OpenError;
use crate::config::{Config, Device};

/// Bytes that a model takes, from its headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    device: Device,
    weights: u64,
    rest: u64,
}

/// Why a model does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoRoom {
    need: Need,
    free: u64,
}

impl Need {
    /// Of a plan. The work space of a step is planned for the CPU alone, so on a GPU this is the least that it can be.
    pub(super) fn new(plan: &Plan, config: &Config) -> Need {
        let bytes = |class| plan.memory.class_bytes(class);
        let (device, state) = (config.device, bytes(MemoryClass::State));
        let more = match device {
            Device::Cpu => bytes(MemoryClass::Workspace),
            // A copy of all that steps write.
            Device::Cuda if config.verify_replay.is_on() => state,
            Device::Cuda => 0,
        };
        Need { device, weights: bytes(MemoryClass::Weights), rest: state.saturating_add(more) }
    }

    /// Errors: it is more than `free` bytes.
    pub(super) fn fits(self, free: u64) -> Result<(), OpenError> {
        let fits = self.weights.saturating_add(self.rest) <= free;
        if fits { Ok(()) } else { Err(NoRoom { need: self, free }.into()) }
    }

    /// Errors: it is more than this machine has left, where that can be known.
    pub(super) fn fits_machine(self) -> Result<(), OpenError> {
        cpu::available_bytes().map_or(Ok(()), |free| self.fits(free))
    }
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Need { device, weights, rest } = self.need;
        let gb = |bytes: u64| format!("{:.1} GB", bytes as f64 / 1e9);
        let (place, elsewhere) = match device {
            Device::Cpu => ("in memory", "or --device cuda with a GPU that has the memory"),
            Device::Cuda => ("on the GPU", "or --device cpu on a machine that has the memory"),
        };
        write!(
            f,
            "the model takes {} for its weights and {} for its KV cache and what steps need, {} together, but {} are free \
             {place}: ",
            gb(weights),
            gb(rest),
            gb(weights.saturating_add(rest)),
            gb(self.free)
        )?;
        if weights > self.free {
            write!(f, "take a file with fewer bits a weight, {elsewhere}")
        } else {
            write!(f, "lower --context, --slots, --kv-tokens or --max-rows, {elsewhere}")
        }
    }
}

impl std::error::Error for NoRoom {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_does_not_fit_is_told_by_how_much_and_what_to_do() {
        let need = |device, weights, rest| Need { device, weights, rest };
        let told = |need: Need, free| need.fits(free).map_err(|error| error.to_string());
        assert_eq!(told(need(Device::Cuda, 100, 41), 141), Ok(()));
        let error = told(need(Device::Cuda, 160_000_000_000, 2_000_000_000), 149_500_000_000).expect_err("too large");
        for part in
            ["160.0 GB", "2.0 GB", "162.0 GB together", "149.5 GB are free on the GPU", "fewer bits", "--device cpu"]
        {
            assert!(error.contains(part), "{error}");
        }
        let error = told(need(Device::Cpu, 10_000_000_000, u64::MAX), 24_000_000_000).expect_err("too large");
        assert!(error.contains("free in memory: lower --context") && error.contains("--device cuda"), "{error}");
    }
}
