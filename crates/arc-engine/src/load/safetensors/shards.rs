//! Sharded models: an index that says which file each tensor is in, believed only as far as the files agree.

use std::cmp::Ordering;
use std::path::{Component, Path};

use arc_device::map::Mapped;

use super::json::{self, Index};
use super::{MAX_INDEX, open_one};
use crate::load::error::LoadError;
use crate::load::weights::Weights;

/// Opens the shards that an index names and checks the index against them.
pub(super) fn open_all(path: &Path) -> Result<Weights, LoadError> {
    let wrong = |problem: String| LoadError::Index { path: path.to_owned(), problem };
    let text = Mapped::open(path).map_err(|source| LoadError::Open { path: path.to_owned(), source })?;
    if text.bytes().len() > MAX_INDEX {
        return Err(wrong(format!("an index of {} bytes is above the limit of {MAX_INDEX}", text.bytes().len())));
    }
    let index = json::index(text.bytes()).map_err(|problem| wrong(format!("the index cannot be used: {problem}")))?;
    if index.tensors.is_empty() {
        return Err(wrong("the index lists no tensors".to_owned()));
    }
    let mut parts = Vec::new();
    for name in &index.files {
        if !is_plain_name(name) {
            return Err(wrong(format!("the index names the shard {name:?}, which is no file of this folder")));
        }
        let shard = path.with_file_name(&**name);
        let missing = |source| LoadError::PartMissing { path: shard.clone(), n_parts: index.files.len(), source };
        let (map, header) = open_one(&shard, missing)?;
        parts.push((shard, map, header.tensors));
    }
    let weights = Weights::new(parts)?;
    compare(&index, &weights).map_err(wrong)?;
    Ok(weights)
}

/// A name without any path around it and fit for a message: an index may come from anywhere, and must not lead out of
/// its folder.
fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    !name.contains(char::is_control)
        && matches!((components.next(), components.next()), (Some(Component::Normal(only)), None) if only == name)
}

/// The index and the shards must list the same tensors in the same files. Both lists are sorted by name.
fn compare(index: &Index, weights: &Weights) -> Result<(), String> {
    let mut found = weights.tensors().iter().peekable();
    for (name, file_idx) in &index.tensors {
        let listed = &index.files[*file_idx as usize];
        let tensor = found
            .next_if(|tensor| *tensor.name <= **name)
            .ok_or_else(|| format!("the index lists tensor {name:?} in {listed}, but it is not there"))?;
        match (*tensor.name).cmp(name) {
            Ordering::Less => return Err(not_listed(&tensor.name, &index.files[tensor.file_idx as usize])),
            _ if tensor.file_idx != *file_idx => {
                let actual = &index.files[tensor.file_idx as usize];
                return Err(format!("the index lists tensor {name:?} in {listed}, but it is in {actual}"));
            }
            _ => {}
        }
    }
    match found.next() {
        Some(tensor) => Err(not_listed(&tensor.name, &index.files[tensor.file_idx as usize])),
        None => Ok(()),
    }
}

fn not_listed(name: &str, file: &str) -> String {
    format!("tensor {name:?} of {file} is not listed in the index: the files are of different models")
}
