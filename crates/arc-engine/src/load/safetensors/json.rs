//! The two JSON objects of safetensors models, read as they stream by: each name and each count has its limit, and
//! nothing is kept but what is asked for.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::load::error::HeaderError;
use crate::load::weights::{MAX_NAME, MAX_TENSORS, Shape};

/// The most tensors in all shards of a model together.
const MAX_LISTED: usize = 1 << 18;
/// The most shards.
const MAX_SHARDS: usize = 1_000;
/// The most entries of `__metadata__`.
const MAX_METADATA: usize = 1 << 16;
/// The longest string, in bytes as written.
const MAX_STRING: usize = 1 << 20;

/// A string of at most [`MAX_NAME`] bytes.
pub(super) struct Name(pub(super) Box<str>);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameVisitor;

        impl Visitor<'_> for NameVisitor {
            type Value = Name;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a string")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Name, E> {
                let len = text.len();
                if len as u64 > MAX_NAME {
                    return Err(E::custom(format_args!("a name of {len} bytes is above the limit of {MAX_NAME}")));
                }
                Ok(Name(text.into()))
            }
        }

        deserializer.deserialize_str(NameVisitor)
    }
}

/// Dimensions, no more than a [`Shape`] holds.
#[derive(Default)]
pub(super) struct Dims {
    len: usize,
    dims: [u64; Shape::MAX_DIMS],
}

impl std::ops::Deref for Dims {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        &self.dims[..self.len]
    }
}

impl<'de> Deserialize<'de> for Dims {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct DimsVisitor;

        impl<'de> Visitor<'de> for DimsVisitor {
            type Value = Dims;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {} dimensions", Shape::MAX_DIMS)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Dims, A::Error> {
                let mut out = Dims::default();
                while let Some(dim) = seq.next_element()? {
                    *out.dims.get_mut(out.len).ok_or_else(|| A::Error::invalid_length(out.len + 1, &self))? = dim;
                    out.len += 1;
                }
                Ok(out)
            }
        }

        deserializer.deserialize_seq(DimsVisitor)
    }
}

/// What a header says of a tensor.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with dtype, shape and data_offsets")]
pub(super) struct Entry {
    pub(super) dtype: Name,
    pub(super) shape: Dims,
    pub(super) data_offsets: [u64; 2],
}

/// The entries of a header, in the order of the file, as yet unchecked.
pub(super) fn entries(header: &str) -> Result<Vec<(Box<str>, Entry)>, HeaderError> {
    struct Entries(Vec<(Box<str>, Entry)>);

    impl<'de> Deserialize<'de> for Entries {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            let mut out = Vec::new();
            let pair = |name: Box<str>, entry| {
                if out.len() as u64 == MAX_TENSORS {
                    return Err(format!("more than {MAX_TENSORS} tensors"));
                }
                out.push((name, entry));
                Ok(())
            };
            deserializer.deserialize_map(EachPair { skipped: Some("__metadata__"), pair, value: PhantomData })?;
            Ok(Self(out))
        }
    }

    let Entries(out) = read(header.as_bytes()).map_err(|problem| HeaderError::Json { problem })?;
    Ok(out)
}

/// Which file each tensor of a sharded model is in.
pub(in crate::load) struct Index {
    /// Names of the shards, sorted.
    pub(in crate::load) files: Vec<Box<str>>,
    /// Names of the tensors, sorted and each once, with an index into `files`.
    pub(in crate::load) tensors: Vec<(Box<str>, u32)>,
}

/// Reads a `model.safetensors.index.json`. The error is a clause for a message.
pub(in crate::load) fn index(text: &[u8]) -> Result<Index, String> {
    #[derive(Deserialize)]
    #[serde(expecting = "an object with a weight_map")]
    struct File {
        weight_map: WeightMap,
    }

    /// Files in the order of their first mention.
    #[derive(Default)]
    struct WeightMap {
        files: BTreeMap<Box<str>, u32>,
        tensors: Vec<(Box<str>, u32)>,
    }

    impl<'de> Deserialize<'de> for WeightMap {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            let mut map = Self::default();
            let pair = |name: Box<str>, Name(file): Name| {
                let n_files = map.files.len();
                let file_idx = *map.files.entry(file).or_insert(n_files as u32);
                map.tensors.push((name, file_idx));
                if map.files.len() > MAX_SHARDS {
                    return Err(format!("more than {MAX_SHARDS} shards"));
                }
                if map.tensors.len() > MAX_LISTED {
                    return Err(format!("more than {MAX_LISTED} tensors"));
                }
                Ok(())
            };
            deserializer.deserialize_map(EachPair { skipped: None, pair, value: PhantomData })?;
            Ok(map)
        }
    }

    let File { weight_map: WeightMap { files, mut tensors } } = read(text)?;
    // From the order of mention to the order of names.
    let mut sorted_idx = vec![0; files.len()];
    for (sorted, mentioned) in files.values().enumerate() {
        sorted_idx[*mentioned as usize] = sorted as u32;
    }
    for (_, file_idx) in &mut tensors {
        *file_idx = sorted_idx[*file_idx as usize];
    }
    tensors.sort_unstable();
    match tensors.array_windows().find(|[a, b]| a.0 == b.0) {
        Some([a, _]) => Err(format!("tensor {:?} is listed twice", a.0)),
        None => Ok(Index { files: files.into_keys().collect(), tensors }),
    }
}

/// An object whose values are strings, passed over.
struct StringMap;

impl<'de> Deserialize<'de> for StringMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut n = 0;
        let pair = |_, AnyString| {
            n += 1;
            if n > MAX_METADATA { Err(format!("more than {MAX_METADATA} entries of __metadata__")) } else { Ok(()) }
        };
        deserializer.deserialize_map(EachPair { skipped: None, pair, value: PhantomData })?;
        Ok(Self)
    }
}

/// A string, passed over.
struct AnyString;

impl<'de> Deserialize<'de> for AnyString {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnyVisitor;

        impl Visitor<'_> for AnyVisitor {
            type Value = AnyString;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a string")
            }

            fn visit_str<E: Error>(self, _: &str) -> Result<AnyString, E> {
                Ok(AnyString)
            }
        }

        deserializer.deserialize_str(AnyVisitor)
    }
}

/// Calls `pair` with every key and value of an object, repeated keys included; the key `skipped` may have a map of
/// strings, which is passed over.
struct EachPair<V, F> {
    skipped: Option<&'static str>,
    pair: F,
    value: PhantomData<V>,
}

impl<'de, V: Deserialize<'de>, F: FnMut(Box<str>, V) -> Result<(), String>> Visitor<'de> for EachPair<V, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(Name(key)) = map.next_key()? {
            if self.skipped == Some(&*key) {
                map.next_value::<StringMap>()?;
            } else {
                (self.pair)(key, map.next_value()?).map_err(A::Error::custom)?;
            }
        }
        Ok(())
    }
}

/// Reads one JSON text that ends where the bytes end, white space aside. Errors are short and on one line, whatever they
/// quote.
fn read<'de, T: Deserialize<'de>>(text: &'de [u8]) -> Result<T, String> {
    check_strings(text)?;
    serde_json::from_slice(text).map_err(|error| {
        let message = error.to_string().replace(char::is_control, " ");
        // What is cut is the middle: the place is at the end.
        match message.char_indices().nth(120) {
            Some((end, _)) => format!("{}... at line {} column {}", &message[..end], error.line(), error.column()),
            None => message,
        }
    })
}

/// Refuses a text with a string of more than [`MAX_STRING`] bytes. The JSON reader quotes a misplaced string whole in
/// its error, character by character, which for one of 16 MiB takes longer than everything else.
fn check_strings(text: &[u8]) -> Result<(), String> {
    // Quotes outside of strings are always plain, so skipping what follows a backslash is right everywhere.
    let (mut start, mut at) = (None, 0);
    while let Some(byte) = text.get(at) {
        match (byte, start) {
            (_, Some(start)) if at - start > MAX_STRING => {
                return Err(format!("the string at byte {start} is longer than the limit of {MAX_STRING}"));
            }
            (b'\\', _) => at += 1,
            (b'"', None) => start = Some(at),
            (b'"', Some(_)) => start = None,
            _ => {}
        }
        at += 1;
    }
    Ok(())
}
