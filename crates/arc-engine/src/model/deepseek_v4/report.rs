//! What a DeepSeek-V4 takes: weights by class, bytes that a token reads, bytes that a sequence keeps. From headers alone.

use arc_device::ops::latent::ROPE_DIM;

use super::config::{LayerKind, V4Config};
use crate::load::ModelFile;
use crate::load::synthetic::table::{Class, Reads, Roles, released};

/// The table.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Weights of the trunk, by class; classes without any are not there.
    pub classes: Vec<ClassRow>,
    /// Bytes of blocks behind the trunk, which draft tokens.
    pub draft_bytes: u64,
    /// Tensors of the trunk in this file.
    pub tensors: usize,
    /// Tensors of the trunk in a released checkpoint of these sizes; `None` for files of another form.
    pub released_tensors: Option<usize>,
    /// What one sequence keeps, whatever its length.
    pub sequence: SequenceState,
    /// Bytes of compressed and index rows that a token adds.
    pub kv_bytes_per_token: usize,
    /// Bytes of both rope tables for one position.
    pub rope_bytes_per_position: usize,
}

/// The weights of one class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassRow {
    /// What they are for.
    pub class: Class,
    /// Values, without scales, and without integers that are looked up.
    pub parameters: u64,
    /// Bytes in the file, scales included.
    pub bytes: u64,
    /// Bytes that one token reads: of routed experts those that it goes to, of tables one row.
    pub read_bytes: u64,
}

/// Bytes of state that a sequence has beside rows in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceState {
    /// Rows of recent tokens, in every layer.
    pub window: usize,
    /// Values that wait to be pooled in sparse layers, those of the indexer included.
    pub sparse_rings: usize,
    /// Likewise in heavy layers.
    pub heavy_rings: usize,
}

impl Report {
    /// Reads it off the list of tensors. Tensors that no DeepSeek-V4 has are left out.
    pub fn new(file: &ModelFile, config: &V4Config) -> Report {
        let roles = Roles::new(config.layers.len());
        let router = config.experts.router;
        let contents = file.contents();
        let known = || contents.iter().filter_map(|tensor| Some((tensor, roles.of(tensor.name)?)));
        let mut classes: Vec<ClassRow> = Vec::new();
        for (tensor, role) in known().filter(|(_, role)| !role.draft) {
            let values = tensor.shape.iter().map(|&dim| dim as u64).product::<u64>();
            let parameters = match tensor.type_name {
                "f8_e8m0" | "i32" | "i64" => 0,
                // Two codes a byte.
                "i8" => 2 * values,
                _ => values,
            };
            let read_bytes = match role.reads {
                Reads::Whole => tensor.n_bytes,
                Reads::Row => tensor.n_bytes / tensor.shape.first().map_or(1, |&rows| rows.max(1) as u64),
                // A share of each expert on average, whether it is a tensor of its own or not.
                Reads::Picked => 0,
            };
            let row = ClassRow { class: role.class, parameters, bytes: tensor.n_bytes, read_bytes };
            match classes.iter_mut().find(|row| row.class == role.class) {
                None => classes.push(row),
                Some(found) => {
                    found.parameters += row.parameters;
                    found.bytes += row.bytes;
                    found.read_bytes += row.read_bytes;
                }
            }
        }
        classes.sort_by_key(|row| row.class);
        for row in classes.iter_mut().filter(|row| row.class == Class::Routed) {
            row.read_bytes = row.bytes / router.experts as u64 * router.chosen as u64;
        }
        let tensors = known().filter(|(_, role)| !role.draft).count();
        let released_tensors = match file {
            ModelFile::Gguf(_) => None,
            ModelFile::Safetensors(_) => Some(tensors),
            ModelFile::Synthetic(model) => {
                let trunk = released(&model.sizes).into_iter().filter(|tensor| !tensor.name.starts_with("mtp."));
                Some(trunk.map(|tensor| tensor.n_tensors()).sum())
            }
        };
        Report {
            classes,
            draft_bytes: known().filter(|(_, role)| role.draft).map(|(tensor, _)| tensor.n_bytes).sum(),
            tensors,
            released_tensors,
            sequence: SequenceState::new(config),
            kv_bytes_per_token: config.kv_bytes_per_token(),
            rope_bytes_per_position: 2 * ROPE_DIM * size_of::<f32>(),
        }
    }

    /// Parameters of the trunk.
    pub fn parameters(&self) -> u64 {
        self.classes.iter().map(|row| row.parameters).sum()
    }

    /// Bytes of the trunk.
    pub fn bytes(&self) -> u64 {
        self.classes.iter().map(|row| row.bytes).sum()
    }

    /// Bytes of the trunk that one token reads.
    pub fn read_bytes(&self) -> u64 {
        self.classes.iter().map(|row| row.read_bytes).sum()
    }
}

impl SequenceState {
    fn new(config: &V4Config) -> SequenceState {
        let of = |kind: LayerKind| {
            let pools = config.rows(kind).into_iter().chain(config.keys(kind));
            let layer: usize = pools.map(|pool| pool.ring_elements(1) * size_of::<f32>()).sum();
            layer * config.layers.iter().filter(|&&layer| layer == kind).count()
        };
        let row = config.row_format().row_bytes(config.attention.dim);
        SequenceState {
            window: config.layers.len() * config.attention.ring() * row,
            sparse_rings: of(LayerKind::Sparse),
            heavy_rings: of(LayerKind::Heavy),
        }
    }

    /// All of it.
    pub fn total(&self) -> usize {
        self.window + self.sparse_rings + self.heavy_rings
    }
}
