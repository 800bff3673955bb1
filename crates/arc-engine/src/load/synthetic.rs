//! Models of random weights, without a file: for tests, for sizing, and for measuring at production widths.
//!
//! ```text
//! synthetic:deepseek-v4-tiny      every kind of layer, a few MB
//! synthetic:deepseek-v4-slice     production widths, one layer of each kind and the MTP block
//! synthetic:deepseek-v4-flash     everything: 87 GB
//!          ,experts=16 ,vocab=1024 ,seed=7        options, in any order
//! ```
//!
//! The tensors have the names, shapes and formats of a GGUF file in the 2-bit recipe ([`table`]). A value depends on the
//! seed, the tensor's name and its place in the tensor alone: Philox words, integer arithmetic and IEEE operations, so
//! the bits are the same on every machine, whoever asks for which rows. Scales are such that the values have the spread
//! of an initialised network; activations stay near 1 from layer to layer.

mod fill;
mod sizes;
pub mod table;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use arc_device::ops::synthetic::SyntheticRows;

pub use sizes::{V4Layer, V4Sizes};
use table::{Class, GgufNames, TensorSpec};

use super::LoadError;

/// What the names of these models begin with.
pub const PREFIX: &str = "synthetic:";

/// Names behind [`PREFIX`].
pub const NAMES: [&str; 3] = ["deepseek-v4-tiny", "deepseek-v4-slice", "deepseek-v4-flash"];

/// A model of random weights.
#[derive(Clone, Debug)]
pub struct Synthetic {
    /// As it was asked for, options included.
    pub name: String,
    /// Its sizes.
    pub sizes: V4Sizes,
    /// Every other seed gives other weights.
    pub seed: u64,
    /// In the order of the model: embedding, layers, MTP block, head.
    tensors: Vec<TensorSpec>,
    /// Index into `tensors` by name.
    by_name: BTreeMap<String, usize>,
    names: GgufNames,
}

impl Synthetic {
    /// Whether `name` asks for a model of this kind.
    pub fn is_name(name: &str) -> bool {
        name.starts_with(PREFIX)
    }

    /// The model of that name. Errors: `BadConfig`, for an unknown name, an unknown option or a value out of range.
    pub fn open(name: &str) -> Result<Self, LoadError> {
        let bad = |what: &str, problem: String| LoadError::BadConfig {
            path: PathBuf::from(name),
            what: what.to_owned(),
            problem,
        };
        let mut parts = name.strip_prefix(PREFIX).unwrap_or(name).split(',');
        let mut sizes = match parts.next() {
            Some("deepseek-v4-tiny") => V4Sizes::tiny(),
            Some("deepseek-v4-slice") => V4Sizes::slice(),
            Some("deepseek-v4-flash") => V4Sizes::flash(),
            _ => return Err(bad("the name", format!("must be {PREFIX} and one of {}", NAMES.join(", ")))),
        };
        let mut seed = 0;
        for option in parts {
            let (key, text) = option.split_once('=').unwrap_or((option, ""));
            let value: u64 = text.parse().map_err(|_| bad(key, format!("needs a whole number, as in {key}=16")))?;
            let within = |least: usize, most: usize| {
                let value = usize::try_from(value).ok().filter(|value| (least..=most).contains(value));
                value.ok_or_else(|| bad(key, format!("is {text}, must be from {least} to {most}")))
            };
            match key {
                "experts" => sizes.n_experts = within(sizes.experts_per_token, 1024)?,
                // At least the special tokens.
                "vocab" => sizes.vocab = within(16, 1 << 20)?,
                "seed" => seed = value,
                _ => return Err(bad(key, "is no option; there are experts, vocab and seed".to_owned())),
            }
        }
        let tensors = table::gguf(&sizes);
        let by_name = tensors.iter().enumerate().map(|(idx, tensor)| (tensor.name.clone(), idx)).collect();
        Ok(Self { name: name.to_owned(), sizes, seed, tensors, by_name, names: GgufNames::default() })
    }

    /// Every tensor, in the order of the model.
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// The tensor of that name.
    pub fn find(&self, name: &str) -> Option<&TensorSpec> {
        self.by_name.get(name).map(|&idx| &self.tensors[idx])
    }

    /// The tensor that holds a released one ([`GgufNames::of`]), and which rows of it: one expert's, or all.
    pub fn released(&self, name: &str) -> Option<(&TensorSpec, Range<usize>)> {
        let (name, expert) = self.names.of(name)?;
        let tensor = self.find(&name)?;
        let Some(expert) = expert.filter(|&expert| expert < self.sizes.n_experts) else {
            return expert.is_none().then_some((tensor, 0..tensor.rows()));
        };
        let rows = tensor.rows() / self.sizes.n_experts;
        Some((tensor, expert * rows..(expert + 1) * rows))
    }

    /// Writes rows `first_row ..` of a tensor. `out`: a whole number of rows, [`TensorSpec::row_bytes`] each, as they
    /// would lie in a file. Panics for rows that the tensor does not have.
    pub fn fill(&self, tensor: &TensorSpec, first_row: usize, out: &mut [u8]) {
        fill::fill(self.seed, tensor, first_row, out);
    }

    /// Rows `first_row ..` of a tensor for a device to make; `None` for a table of picks.
    pub fn rows_of(&self, tensor: &TensorSpec, first_row: usize) -> Option<SyntheticRows> {
        fill::rows(self.seed, tensor, first_row)
    }

    /// All bytes of a tensor.
    pub fn bytes(&self, tensor: &TensorSpec) -> Vec<u8> {
        self.rows(tensor, 0..tensor.rows())
    }

    /// The bytes of some rows of a tensor.
    pub fn rows(&self, tensor: &TensorSpec, rows: Range<usize>) -> Vec<u8> {
        let mut out = vec![0; rows.len() * tensor.row_bytes()];
        self.fill(tensor, rows.start, &mut out);
        out
    }

    /// The sum of all tensors, the MTP block included.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.n_bytes() as u64).sum()
    }

    /// Bytes that one token reads of the trunk's weights, by class: routed experts as far as they are picked, one row of
    /// the tables that are indexed by a token.
    pub fn read_bytes(&self) -> BTreeMap<Class, u64> {
        let mut by_class = BTreeMap::new();
        for tensor in self.tensors.iter().filter(|tensor| !tensor.mtp) {
            *by_class.entry(tensor.class).or_default() += tensor.read_bytes(&self.sizes);
        }
        by_class
    }
}

#[cfg(test)]
mod tests;
