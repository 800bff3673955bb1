//! What is in a model, as a list.

use super::{ModelFile, Shape};

/// A tensor as a table of contents has it.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry<'a> {
    /// Name in the file.
    pub name: &'a str,
    /// Name of the stored type, lower-case.
    pub type_name: &'static str,
    /// Outermost first.
    pub shape: Shape,
    /// Bytes in the file.
    pub n_bytes: u64,
}

impl ModelFile {
    /// Every tensor: by name, and in the order of the model where there is no file.
    pub fn contents(&self) -> Vec<Entry<'_>> {
        let stored = self.weights().into_iter().flat_map(|weights| weights.tensors()).map(|tensor| Entry {
            name: &tensor.name,
            type_name: tensor.type_name,
            shape: tensor.shape,
            n_bytes: tensor.range.len() as u64,
        });
        let made = match self {
            ModelFile::Synthetic(model) => model.tensors(),
            _ => &[],
        };
        let made = made.iter().map(|tensor| Entry {
            name: &tensor.name,
            type_name: tensor.format.map_or("i32", |format| format.name()),
            shape: tensor.shape,
            n_bytes: tensor.n_bytes() as u64,
        });
        stored.chain(made).collect()
    }
}
