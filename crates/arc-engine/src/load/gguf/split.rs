//! Models split into several GGUF files, `NAME-00001-of-00003.gguf` and so on.
//!
//! Source: the naming and the `split.*` metadata of the GGUF specification.

use std::io;
use std::path::{Path, PathBuf};

use arc_device::map::Mapped;

use super::GgufHeader;
use super::metadata::Optional;
use crate::load::error::{HeaderError, LoadError};
use crate::load::weights::Tensor;

/// The most parts of a model.
const MAX_PARTS: u32 = 1_000;

/// A mapped part with its tensors.
type Part = (PathBuf, Mapped, Vec<Tensor>);

/// Opens a file and, where it is part of a split model, all parts in order. Returns the header of the first part, whose
/// tensors are with the others in the parts.
pub(super) fn open_all(path: &Path) -> Result<(GgufHeader, Vec<Part>), LoadError> {
    let (map, mut header) = open_one(path, |source| LoadError::Open { path: path.to_owned(), source })?;
    let n_parts = header.metadata(map.bytes(), path).get_u32("split.count").optional()?.unwrap_or(1);
    if n_parts <= 1 {
        let tensors = header.take_tensors();
        return Ok((header, vec![(path.to_owned(), map, tensors)]));
    }
    if n_parts > MAX_PARTS {
        let what = "the number of parts".to_owned();
        let problem = HeaderError::TooLarge { what, found: n_parts.into(), limit: MAX_PARTS.into() };
        return Err(LoadError::Header { path: path.to_owned(), problem });
    }
    drop(map);
    let mut first = None;
    let mut parts = Vec::new();
    for idx in 0..n_parts {
        let path = part_path(path, idx, n_parts)?;
        let missing = |source| LoadError::PartMissing { path: path.clone(), n_parts: n_parts as usize, source };
        let (map, mut header) = open_one(&path, missing)?;
        check_part(&header, map.bytes(), &path, idx, n_parts)?;
        parts.push((path, map, header.take_tensors()));
        first.get_or_insert(header);
    }
    let first = first.expect("there are at least two parts");
    let (path, map, _) = &parts[0];
    let stated = first.metadata(map.bytes(), path).get_u64("split.tensors.count").optional()?;
    let found = parts.iter().map(|(_, _, tensors)| tensors.len() as u64).sum::<u64>();
    match stated {
        Some(stated) if stated != found => Err(LoadError::WrongPart {
            path: path.clone(),
            problem: format!("the parts of this model should have {stated} tensors together, but have {found}"),
        }),
        _ => Ok((first, parts)),
    }
}

/// Maps one file and checks its header; `cannot_open` makes the error of a file that is not there.
fn open_one(path: &Path, cannot_open: impl FnOnce(io::Error) -> LoadError) -> Result<(Mapped, GgufHeader), LoadError> {
    let map = Mapped::open(path).map_err(cannot_open)?;
    let header = GgufHeader::parse(map.bytes(), map.bytes().len() as u64)
        .map_err(|problem| LoadError::Header { path: path.to_owned(), problem })?;
    Ok((map, header))
}

/// The path of part `idx` (from 0) beside `path`, itself a part of the same model.
fn part_path(path: &Path, idx: u32, n_parts: u32) -> Result<PathBuf, LoadError> {
    let stem = path.file_name().and_then(|name| name.to_str()).and_then(|name| {
        let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |s: &str| s.len() == 5 && s.bytes().all(|byte| byte.is_ascii_digit());
        (digits(number) && digits(count) && count.parse() == Ok(n_parts)).then_some(stem)
    });
    let stem = stem.ok_or_else(|| LoadError::WrongPart {
        path: path.to_owned(),
        problem: format!(
            "this is one of {n_parts} parts of a model, but its name does not end in -00001-of-{n_parts:05}.gguf or \
             alike, so the others cannot be found: give it its name back"
        ),
    })?;
    Ok(path.with_file_name(format!("{stem}-{:05}-of-{n_parts:05}.gguf", idx + 1)))
}

/// A part must say of itself that it is the one that its name says.
fn check_part(header: &GgufHeader, bytes: &[u8], path: &Path, idx: u32, n_parts: u32) -> Result<(), LoadError> {
    let metadata = header.metadata(bytes, path);
    let found = (metadata.get_u32("split.no")?, metadata.get_u32("split.count")?);
    if found != (idx, n_parts) {
        return Err(LoadError::WrongPart {
            path: path.to_owned(),
            problem: format!(
                "by its name this is part {} of {n_parts}, but by its metadata part {} of {}",
                idx + 1,
                u64::from(found.0) + 1,
                found.1
            ),
        });
    }
    Ok(())
}
